"""Further roles, beside those every algorithm knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar

from hybridflow.config.model import Model
from hybridflow.config.parallelism import Parallelism
from hybridflow.config.reward import OF_SCORES
from hybridflow.config.section import Section
from hybridflow.config.training import TrainingEngine


class RoleKind(Enum):
    """What a role can do."""

    reference = "reference"
    reward_function = "reward_function"
    reward_model = "reward_model"
    critic = "critic"


@dataclass
class Role(Section):
    """A role of the user's own dataflow."""

    kind: RoleKind = RoleKind.reference
    """reference: log-probabilities of a frozen model; reward_function: scores from functions; reward_model: scores
    from a model, and functions beside it; critic: a further value model, trained as `critic` is."""

    model: Model = field(default_factory=Model)
    """The role's model; the run's (`model.path`) where its path is null, and for the kind critic that of `critic`."""

    engine: TrainingEngine = TrainingEngine.auto
    """The machine that runs the model; auto: single on one device, fsdp on several."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the model is spread over the devices of its pool."""

    functions: list[str] = field(default_factory=list)
    """Reward functions, for the kinds reward_function and reward_model."""

    weights: list[Annotated[float, OF_SCORES]] = field(default_factory=list)
    """One weight per function; empty means 1 each."""

    process: bool = False
    """The reward model judges every token, for the kind reward_model."""

    pool: str | None = None
    """The pool it lives in; null means that of `placement`."""


class DescribesRoles:
    """A dataflow may itself say what its further roles are, unless the run says otherwise."""

    roles: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """What `roles.<name>` is, by name: `{"style": {"kind": "reward_function", "functions": [f"{__file__}:f"]}}`."""
