"""The algorithm: how samples become gradients."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from hybridflow.config.ranges import (
    ABOVE_0,
    ABOVE_0_OR_NULL,
    AT_LEAST_1,
    FINITE,
    FROM_0_TO_1,
    NOT_BELOW_0,
    SHARE,
    number,
)
from hybridflow.config.section import Section

_ABOVE_1 = number("above 1", lambda v: v > 1, ", or null")
_SMOOTHING = number("from 0 to below 0.5", lambda v: 0 <= v < 0.5, ", where labels would say nothing")


class KLPlacement(Enum):
    """Where the divergence from the reference model counts."""

    none = "none"
    reward = "reward"
    loss = "loss"


@dataclass
class KL(Section):
    """The tie to the reference model."""

    placement: KLPlacement = KLPlacement.none
    """reward: subtracted from each token's reward; loss: added to the policy loss; none: no reference model."""

    coefficient: Annotated[float, NOT_BELOW_0] = 0.001
    """Weight of the divergence; the starting weight when `target` is set."""

    estimator: str | None = None
    """k1, abs, k2 or k3 (also kl, mse, low_var_kl), k3 at most 10 per token; a trailing + takes k2's gradient.
    null: k1 in the reward, k3+ in the loss."""

    allow_k1_loss: bool = False
    """Permit k1 in the loss, though its gradient does not hold the policy near the reference."""

    target: Annotated[float | None, ABOVE_0_OR_NULL] = None
    """Adapt the coefficient toward this divergence per token (Ziegler et al. 2019); null keeps it fixed."""

    horizon: Annotated[int, AT_LEAST_1] = 10000
    """Sequences over which the adaptive coefficient moves."""

    @property
    def estimator_in_use(self) -> str:
        """The configured estimator, else k3+ in the loss and k1 in the reward."""
        default = "k3+" if self.placement is KLPlacement.loss else "k1"
        return default if self.estimator is None else self.estimator


class OldLogprobs(Enum):
    """Where the log-probabilities of the policy before the update come from."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"


class CorrectionLevel(Enum):
    """Of what an importance ratio is taken."""

    none = "none"
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


@dataclass
class Correction(Section):
    """What is done about samples whose rollout gave them other probabilities than training does."""

    weights: CorrectionLevel = CorrectionLevel.none
    """The loss of each token is multiplied by the ratio of training's probability to the rollout's: of the token, of
    the whole response (sequence: the product), or a token on average (geometric)."""

    upper: Annotated[float, ABOVE_0] = 2.0
    """Weights are cut here (truncated importance sampling); with `lower`, those above it are 0 instead."""

    lower: Annotated[float | None, ABOVE_0] = None
    """Weights below this or above `upper` are 0 (IcePop), and their tokens still count in averages; null only cuts."""

    normalize: bool = False
    """Divide the weights by their mean over the batch: over tokens, or over responses for whole responses' ratios."""

    reject: CorrectionLevel = CorrectionLevel.none
    """Leave out of the policy's loss, and of its averages, what has a ratio outside `reject_lower` .. `reject_upper`:
    single tokens, or whole responses by the product (sequence) or the geometric mean (geometric) of their tokens'."""

    reject_upper: Annotated[float, ABOVE_0] = 2.0
    """Largest ratio that `reject` lets pass; 1.001 or so for the geometric mean."""

    reject_lower: Annotated[float | None, ABOVE_0] = None
    """Smallest ratio that `reject` lets pass; null means 1 / `reject_upper`."""

    veto: Annotated[float | None, ABOVE_0] = None
    """Leave out every response that has a token with a ratio below this, such as 1e-4; null leaves none out."""

    @property
    def is_active(self) -> bool:
        """Whether anything is corrected, which needs `old_logprobs` and `rollout_logprobs`."""
        return (self.weights, self.reject, self.veto) != (CorrectionLevel.none, CorrectionLevel.none, None)


@dataclass
class Preference(Section):
    """How a model learns from what people prefer: DPO and its kin, KTO, and reward models."""

    loss: str = "sigmoid"
    """Pairs: sigmoid (DPO), ipo, hinge, orpo or simpo; single responses with a label: kto."""

    beta: Annotated[float, ABOVE_0] = 0.1
    """How strongly the policy is tied to the reference; the weight of the odds ratio in orpo."""

    label_smoothing: Annotated[float, _SMOOTHING] = 0.0
    """The chance that a pair's label is wrong (sigmoid)."""

    reference_free: bool = False
    """Compare with a reference that finds everything equally likely, and load none."""

    margin: Annotated[float, NOT_BELOW_0] = 0.0
    """By how much the chosen response must be better (simpo: gamma / beta)."""

    imitation: Annotated[float, NOT_BELOW_0] = 0.0
    """Weight of the chosen response's cross-entropy beside the loss."""

    desirable_weight: Annotated[float, NOT_BELOW_0] = 1.0
    """Weight of responses that people like (kto)."""

    undesirable_weight: Annotated[float, NOT_BELOW_0] = 1.0
    """Weight of responses that people do not like (kto)."""

    center_coefficient: Annotated[float, NOT_BELOW_0] = 0.0
    """Reward models: weight of the squared sum of a pair's scores, which keeps scores around 0."""


@dataclass
class Algorithm(Section):
    """The algorithm's numbers; `algorithm=ppo`, `algorithm=grpo` and others choose sets of them."""

    advantage: str = "gae"
    """The estimator: gae needs a critic, most others compare the samples of one prompt
    (`hybridflow show --algorithms` lists them); or your own function, as `file.py:f` or `my_package.f`."""

    advantage_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the estimator's own, which are its function's keyword parameters."""

    policy_loss: str = "ppo"
    """The policy's loss per token; or your own function, as `file.py:f` or `my_package.f`."""

    loss_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the loss's own, which are its function's keyword parameters."""

    old_logprobs: OldLogprobs = OldLogprobs.auto
    """The denominator of the loss's ratio. recompute: from a separate forward pass before the update. auto: from that
    pass only where something needs it (several optimizer steps per batch, a correction, an estimator or a selection of
    tokens that reads it, KL in the reward), else from the update's own pass, which gives the same numbers. KL in the
    reward reads the rollout's log-probabilities instead where they are the training model's own up to rounding in
    float32: rollout.engine=transformers, actor.engine=single or fsdp, model.dtype=float32, no LoRA, and sampling from
    all tokens (top_p=1, top_k=0). rollout: from the rollout, so that the ratio itself corrects for a mismatch (two
    policies); the separate pass is made only where the two are compared, and for KL in the reward with top_p or top_k.
    """

    gamma: Annotated[float, FROM_0_TO_1] = 1.0
    """Discount of later rewards."""

    lam: Annotated[float, FROM_0_TO_1] = 1.0
    """GAE's lambda: 1 has no bias, less has less variance."""

    whiten_advantages: bool | None = None
    """Scale advantages to mean 0 and standard deviation 1 over the batch; null: where the estimator asks for it."""

    clip_low: Annotated[float, SHARE] = 0.2
    """Lower bound of the probability ratio is 1 - clip_low."""

    clip_high: Annotated[float, ABOVE_0] = 0.2
    """Upper bound of the probability ratio is 1 + clip_high."""

    dual_clip: Annotated[float | None, _ABOVE_1] = None
    """Bounds the loss of bad actions at this multiple of the advantage; null turns it off."""

    value_clip: Annotated[float | None, ABOVE_0_OR_NULL] = 0.2
    """New values may differ from the old ones by this much in the critic's loss; null turns it off."""

    aggregation: str | None = None
    """token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm; null: as the loss
    asks, which is token-mean for most."""

    entropy_coefficient: Annotated[float, FINITE] = 0.0
    """Weight of the entropy bonus."""

    mask_truncated: bool = False
    """Leave responses that met their length limit out of the loss (DAPO's overlong filtering)."""

    pretraining_coefficient: Annotated[float, NOT_BELOW_0] = 0.0
    """Weight of the cross-entropy on `data.pretraining_files` beside the policy loss (PPO-ptx)."""

    kl: KL = field(default_factory=KL)
    """The tie to the reference model."""

    correction: Correction = field(default_factory=Correction)
    """What is done where rollout and training disagree."""

    preference: Preference = field(default_factory=Preference)
    """Learning from preferences (main_dpo, main_kto, main_reward_model)."""
