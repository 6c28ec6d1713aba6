"""Settings of the algorithm."""

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
_SMOOTHING = number("from 0 to below 0.5", lambda v: 0 <= v < 0.5, ", at which labels would carry no information")


class KLPlacement(Enum):
    """Where the KL divergence from the reference model is applied."""

    none = "none"
    reward = "reward"
    loss = "loss"


@dataclass
class KL(Section):
    """KL regularization toward the reference model."""

    placement: KLPlacement = KLPlacement.none
    """reward: subtracted from each token's reward; loss: added to the policy loss; none: no reference model."""

    coefficient: Annotated[float, NOT_BELOW_0] = 0.001
    """Weight of the divergence; the starting weight when `target` is set."""

    estimator: str | None = None
    """k1, abs, k2 or k3 (also kl, mse, low_var_kl); k3 is capped at 10 per token. A trailing + uses k2's gradient.
    null: k1 in the reward, k3+ in the loss."""

    allow_k1_loss: bool = False
    """Permit k1 in the loss, although its gradient does not keep the policy close to the reference."""

    target: Annotated[float | None, ABOVE_0_OR_NULL] = None
    """Adapt the coefficient toward this divergence per token (Ziegler et al. 2019); null keeps it fixed."""

    horizon: Annotated[int, AT_LEAST_1] = 10000
    """Time constant of the adaptive coefficient, in sequences."""

    @property
    def estimator_in_use(self) -> str:
        """The configured estimator; by default k3+ in the loss and k1 in the reward."""
        default = "k3+" if self.placement is KLPlacement.loss else "k1"
        return default if self.estimator is None else self.estimator


class OldLogprobs(Enum):
    """Source of the policy's log-probabilities before the update."""

    auto = "auto"
    recompute = "recompute"
    rollout = "rollout"
    interpolate = "interpolate"

    @property
    def reads_rollout(self) -> bool:
        """Whether they follow from the rollout's, so that the update needs no forward pass before it."""
        return self in (OldLogprobs.rollout, OldLogprobs.interpolate)


class CorrectionLevel(Enum):
    """Granularity of an importance ratio."""

    none = "none"
    token = "token"
    sequence = "sequence"
    geometric = "geometric"


@dataclass
class Correction(Section):
    """Rollout correction: importance weights and rejection for samples whose probabilities differ between rollout and
    training."""

    weights: CorrectionLevel = CorrectionLevel.none
    """Multiply each token's loss by the ratio of its probability in training to that in the rollout: per token, over
    the whole response (sequence: the product), or its geometric mean per token (geometric)."""

    upper: Annotated[float, ABOVE_0] = 2.0
    """Weights are truncated here (truncated importance sampling); with `lower`, weights above it become 0 instead."""

    lower: Annotated[float | None, ABOVE_0] = None
    """Weights below this or above `upper` become 0 (IcePop); their tokens still count in averages. null: no bound."""

    normalize: bool = False
    """Divide the weights by their mean over the batch: over tokens, or over responses for response-level ratios."""

    reject: CorrectionLevel = CorrectionLevel.none
    """Exclude from the policy loss and its averages whatever has a ratio outside `reject_lower` .. `reject_upper`:
    single tokens, or whole responses by the product (sequence) or geometric mean (geometric) of their ratios."""

    reject_upper: Annotated[float, ABOVE_0] = 2.0
    """Largest ratio that `reject` accepts; about 1.001 for the geometric mean."""

    reject_lower: Annotated[float | None, ABOVE_0] = None
    """Smallest ratio that `reject` accepts; null means 1 / `reject_upper`."""

    veto: Annotated[float | None, ABOVE_0] = None
    """Exclude every response with a token whose ratio is below this, such as 1e-4; null excludes none."""

    @property
    def is_active(self) -> bool:
        """Whether anything is corrected, which needs `old_logprobs` and `rollout_logprobs`."""
        return (self.weights, self.reject, self.veto) != (CorrectionLevel.none, CorrectionLevel.none, None)


@dataclass
class Preference(Section):
    """Learning from preferences: DPO and its variants, KTO, and reward models."""

    loss: str = "sigmoid"
    """Pairs: sigmoid (DPO), ipo, hinge, orpo or simpo; single responses with a label: kto."""

    beta: Annotated[float, ABOVE_0] = 0.1
    """Strength of the regularization toward the reference; in orpo, the weight of the odds ratio."""

    label_smoothing: Annotated[float, _SMOOTHING] = 0.0
    """Assumed probability that a pair is labeled the wrong way around (sigmoid)."""

    reference_free: bool = False
    """Use a uniform reference instead of loading a reference model."""

    margin: Annotated[float, NOT_BELOW_0] = 0.0
    """Margin by which the chosen response should win (simpo: gamma / beta)."""

    imitation: Annotated[float, NOT_BELOW_0] = 0.0
    """Weight of the chosen response's cross-entropy, added to the loss."""

    desirable_weight: Annotated[float, NOT_BELOW_0] = 1.0
    """Weight of desirable responses (kto)."""

    undesirable_weight: Annotated[float, NOT_BELOW_0] = 1.0
    """Weight of undesirable responses (kto)."""

    center_coefficient: Annotated[float, NOT_BELOW_0] = 0.0
    """Reward models: weight of the squared sum of a pair's scores, which keeps scores around 0."""


@dataclass
class Algorithm(Section):
    """Hyperparameters of the algorithm; `algorithm=ppo`, `algorithm=grpo` and others are presets of them."""

    advantage: str = "gae"
    """Advantage estimator: gae needs a critic, most others compare the samples of one prompt
    (`hybridflow show --algorithms` lists them); or your own function, as `file.py:f` or `my_package.f`."""

    advantage_settings: dict[str, Any] = field(default_factory=dict)
    """Settings specific to the estimator: the keyword parameters of its function."""

    policy_loss: str = "ppo"
    """Policy loss per token; or your own function, as `file.py:f` or `my_package.f`."""

    loss_settings: dict[str, Any] = field(default_factory=dict)
    """Settings specific to the loss: the keyword parameters of its function."""

    old_logprobs: OldLogprobs = OldLogprobs.auto
    """Where the old log-probabilities (the denominator of the importance ratio) come from. recompute: a separate
    forward pass before the update. auto: that pass only where it is needed (several optimizer steps per batch, a
    rollout correction, an estimator or token selection that reads it, KL in the reward), else the update's own forward
    pass, which gives the same numbers. KL in the reward uses the rollout's log-probabilities instead where they equal
    those of training up to float32 rounding: rollout.engine=transformers, actor.engine=single or fsdp,
    model.dtype=float32, no LoRA, and sampling from all tokens (top_p=1, top_k=0). In an asynchronous run without
    importance weights, auto means rollout. rollout: the rollout's, so that the ratio itself corrects for a mismatch
    (two policies); the separate pass is made only where the two are compared, and for KL in the reward with top_p or
    top_k. interpolate: for samples at least two versions old, between the rollout's and the current policy's by the
    age of each token, without a separate pass (A-3PO); needs `correction.weights`."""

    gamma: Annotated[float, FROM_0_TO_1] = 1.0
    """Discount factor."""

    lam: Annotated[float, FROM_0_TO_1] = 1.0
    """GAE's lambda: 1 is unbiased, smaller values reduce variance."""

    whiten_advantages: bool | None = None
    """Normalize advantages to mean 0 and standard deviation 1 over the batch; null: if the estimator requires it."""

    clip_low: Annotated[float, SHARE] = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""

    clip_high: Annotated[float, ABOVE_0] = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""

    dual_clip: Annotated[float | None, _ABOVE_1] = None
    """Dual-clip bound: limit the loss of tokens with negative advantage to this multiple of the advantage; null turns
    it off."""

    value_clip: Annotated[float | None, ABOVE_0_OR_NULL] = 0.2
    """Clip range of the critic's new values around the old ones; null turns clipping off."""

    aggregation: str | None = None
    """token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm; null: the default of
    the loss, which is token-mean for most."""

    entropy_coefficient: Annotated[float, FINITE] = 0.0
    """Weight of the entropy bonus."""

    mask_truncated: bool = False
    """Exclude responses that reached the length limit from the loss (DAPO's overlong filtering)."""

    pretraining_coefficient: Annotated[float, NOT_BELOW_0] = 0.0
    """Weight of the cross-entropy on `data.pretraining_files`, added to the policy loss (PPO-ptx)."""

    kl: KL = field(default_factory=KL)
    """KL regularization toward the reference model."""

    correction: Correction = field(default_factory=Correction)
    """Correction for differences between rollout and training."""

    preference: Preference = field(default_factory=Preference)
    """Learning from preferences (hybridflow dpo, kto and reward-model)."""
