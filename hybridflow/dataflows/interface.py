"""What a dataflow is: roles it names, settings of its own, and one step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, get_args, get_type_hints

from hybridflow.batch import Batch
from hybridflow.batch.accounting import check_accounted, check_unique
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.roles import Generates, Policy, Predicts, Scores, ValueFunction
from hybridflow.dataflows.stages import batch_metrics
from hybridflow.observability.metrics import Metrics

ROLE_TYPES = (Generates, Scores, Predicts, Policy, ValueFunction)


@dataclass(frozen=True)
class RoleNeed:
    """A role that a dataflow names: its kind, and whether it can do without."""

    kind: type
    is_optional: bool


@dataclass
class NoSettings:
    """The settings of a dataflow that has none."""


class Dataflow(ABC):
    """A program over roles. A subclass names its roles as annotations, and writes `step`.

        class BestOfTwo(Dataflow):
            actor: Policy
            rollout: Generates
            reward: Scores
            reference: Predicts | None      # there only if the configuration asks for it

            @dataclass
            class Settings:
                threshold: float = 0.5      # dataflow_settings.threshold=0.7

            def step(self, prompts): ...

    `iteration` counts finished steps; `last_batch` is what `observe` was last shown, for the sample table.
    """

    Settings: ClassVar[type] = NoSettings
    data: ClassVar[str] = "prompts"
    """What the loader gives: prompts, or demonstrations (prompts with responses)."""

    def __init__(self, roles: Mapping[str, object], *, settings: object, samples_per_prompt: int) -> None:
        for name in role_needs(type(self)):
            setattr(self, name, roles.get(name))
        self.settings = settings
        self.samples_per_prompt = samples_per_prompt
        self.iteration = 0
        self.last_batch: BatchRef | None = None

    @abstractmethod
    def step(self, prompts: Batch) -> Metrics:
        """One iteration on prompts [B] of the loader."""

    def observe(self, prompts: Batch, batch: BatchRef) -> Metrics:
        """Scores and lengths as metrics, after checking that every prompt that entered left."""
        check_unique(prompts.row("uid"))
        check_accounted(prompts.row("uid"), batch.row("uid"), samples_per_prompt=self.samples_per_prompt, stage="step")
        self.last_batch = batch
        return batch_metrics(batch)

    def state(self) -> dict[str, object]:
        """What the dataflow itself must remember over a restart (JSON)."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Puts back what `state` gave."""
        assert not state, f"{type(self).__name__} was given a state that it does not restore: {state}"


def role_needs(dataflow: type[Dataflow]) -> dict[str, RoleNeed]:
    """The roles that a dataflow names in its annotations, in order."""
    needs = {}
    for name, hint in get_type_hints(dataflow).items():
        options = get_args(hint) or (hint,)
        kinds = [option for option in options if option in ROLE_TYPES]
        if kinds:
            needs[name] = RoleNeed(kinds[0], is_optional=NoneType in options)
    return needs
