"""Settings of additional roles."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar

from hybridflow.config.model import Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.ranges import AT_LEAST_1
from hybridflow.config.reward import OF_SCORES
from hybridflow.config.section import Section
from hybridflow.config.training import TrainingEngine


class RoleKind(Enum):
    """Kinds of roles."""

    reference = "reference"
    reward_function = "reward_function"
    reward_model = "reward_model"
    critic = "critic"


@dataclass
class Role(Section):
    """A role in addition to the actor, critic, rollout, reward and reference."""

    kind: RoleKind = RoleKind.reference
    """reference: log-probabilities of a frozen model; reward_function: scores from functions; reward_model: scores
    from a model and optional functions; critic: an additional value model, trained as `critic` is."""

    model: Model = field(default_factory=Model)
    """The role's model; a null path means the model of the run (`model.path`), or of `critic` for the kind critic."""

    engine: TrainingEngine = TrainingEngine.auto
    """Engine that runs the model; auto: single on one device, fsdp on several."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the model is parallelized over the devices of its pool."""

    microbatch_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Maximum number of tokens per forward pass on each device; null: that of `actor`, for a critic of `critic`, for a
    reward model of `reward`; in a pool of CPUs at most 4,096."""

    offload_parameters: bool | None = None
    """Offload the weights to CPU while the role is idle; null: that of the same section as for `microbatch_tokens`."""

    functions: list[str] = field(default_factory=list)
    """Reward functions, for the kinds reward_function and reward_model."""

    weights: list[Annotated[float, OF_SCORES]] = field(default_factory=list)
    """One weight per function; empty means 1 each."""

    process: bool = False
    """Whether the reward model scores every token, for the kind reward_model."""

    pool: str | None = None
    """The pool of the role; null means the one that `placement` gives it."""


class DescribesRoles:
    """Base of dataflows: a class can describe its additional roles, which the configuration can override."""

    roles: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """`roles.<name>` by name: `{"style": {"kind": "reward_function", "functions": [f"{__file__}:f"]}}`."""
