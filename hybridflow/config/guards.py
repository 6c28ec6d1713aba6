"""Settings of the checks on the numbers of a training role."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar

from hybridflow.config.ranges import ABOVE_0_OR_NULL, AT_LEAST_0
from hybridflow.config.section import Section


class GuardAction(Enum):
    """The response to a finding of a guard: a warning, a step that is not taken, or a numeric fault."""

    warn = "warn"
    skip = "skip"
    fault = "fault"


@dataclass
class Limit(Section):
    """A limit on one number of an optimizer step."""

    word: ClassVar[str | None] = "above"
    """See `Section.word`."""

    above: Annotated[float | None, ABOVE_0_OR_NULL] = None
    """Largest absolute value that is accepted; null accepts every finite value."""

    action: GuardAction = GuardAction.warn
    """warn; skip: leave the weights and the optimizer as they are; fault: a numeric fault (`trainer.faults`)."""


@dataclass
class Guards(Section):
    """Checks of every optimizer step, before it is taken; all ranks decide alike."""

    non_finite: GuardAction = GuardAction.fault
    """If the loss, the gradient's norm, the ratio or the KL divergence is NaN or infinite: skip or fault."""

    loss: Limit = field(default_factory=Limit)
    """Loss of the minibatch (`actor/pg_loss`, `critic/vf_loss`, `train/loss`)."""

    grad_norm: Limit = field(default_factory=Limit)
    """Norm of the gradient, before clipping."""

    ratio: Limit = field(default_factory=Limit)
    """Largest ratio of a token's probability to that under the policy before the update (`actor/ratio_max`)."""

    kl: Limit = field(default_factory=Limit)
    """Mean divergence from the policy before the update, in nats per token (`actor/ppo_kl`)."""

    replicas: GuardAction = GuardAction.warn
    """If the weights of data-parallel replicas differ: warn or fault."""

    replicas_every: Annotated[int, AT_LEAST_0] = 100
    """Optimizer steps between comparisons of the replicas' weights, by checksums; 0 turns them off."""
