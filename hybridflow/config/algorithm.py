"""The algorithm: how samples become gradients."""

from dataclasses import dataclass, field
from enum import Enum

from hybridflow.config.section import Section


class Advantage(Enum):
    """Estimator of the advantage."""

    gae = "gae"
    grpo = "grpo"


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

    coefficient: float = 0.001
    """Weight of the divergence; the starting weight when `target` is set."""

    estimator: str = "k1"
    """k1, abs, k2 or k3 (also kl, mse, low_var_kl); a trailing + takes k2's gradient."""

    target: float | None = None
    """Adapt the coefficient toward this divergence a token (Ziegler et al. 2019); null keeps it fixed."""

    horizon: int = 10000
    """Sequences over which the adaptive coefficient moves."""


@dataclass
class Algorithm(Section):
    """The algorithm's numbers; `algorithm=ppo` and `algorithm=grpo` choose sets of them."""

    advantage: Advantage = Advantage.gae
    """gae needs a critic; grpo compares the samples of one prompt."""

    gamma: float = 1.0
    """Discount of later rewards."""

    lam: float = 1.0
    """GAE's lambda: 1 has no bias, less has less variance."""

    divide_by_std: bool = True
    """GRPO: divide by the group's standard deviation."""

    whiten_advantages: bool = True
    """GAE: scale advantages to mean 0 and standard deviation 1 over the batch."""

    clip_low: float = 0.2
    """Lower bound of the probability ratio is 1 - clip_low."""

    clip_high: float = 0.2
    """Upper bound of the probability ratio is 1 + clip_high."""

    dual_clip: float | None = None
    """Bounds the loss of bad actions at this multiple of the advantage (above 1); null turns it off."""

    value_clip: float | None = 0.2
    """New values may differ from the old ones by this much in the critic's loss; null turns it off."""

    aggregation: str = "token-mean"
    """token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean or seq-mean-token-sum-norm."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus."""

    kl: KL = field(default_factory=KL)
    """The tie to the reference model."""
