"""What a dataflow is: roles it names, settings of its own, and one step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Protocol, get_args, get_type_hints

from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.accounting import check_accounted, check_unique
from hybridflow.config.algorithm import KLPlacement
from hybridflow.config.experiment import Experiment
from hybridflow.config.roles import DescribesRoles
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.roles import ROLE_TYPES, Policy, Sampler
from hybridflow.dataflows.stages import batch_metrics
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics

PREFERENCE_DATA = ("preferences", "labelled")
"""Kinds of data (`Dataflow.data`) with judged responses: pairs, and single ones."""


class Stream(Protocol):
    """An endless stream of batches, whose place every checkpoint keeps."""

    def next(self) -> Batch:
        """The next batch."""
        ...


@dataclass(frozen=True)
class RoleNeed:
    """A role that a dataflow names: its kind, and whether it can do without."""

    kind: type
    is_optional: bool


@dataclass
class NoSettings:
    """The settings of a dataflow that has none."""


class Dataflow(DescribesRoles, ABC):
    """A program over roles. A subclass names its roles as annotations, and writes `step`.

        class BestOfTwo(Dataflow):
            actor: Policy
            rollout: Sampler
            reward: Scorer
            reference: FrozenModel | None      # there only if the configuration asks for it
            style: Scorer
            roles: ClassVar = {"style": {"kind": "reward_function", "functions": ["format"]}}     # roles.style=...

            @dataclass
            class Settings:
                threshold: float = 0.5      # dataflow_settings.threshold=0.7

            def step(self, prompts): ...

    `iteration` counts finished steps, and `seed` is the run's: random numbers that follow from these two alone are
    drawn again by a resumed run. `max_response_tokens` is the longest response of the run. `wants_old_logprobs` says
    whether the configuration needs `actor.logprobs` before the update (`algorithm.old_logprobs`). `last_batch` is what
    `observe` was last shown, for the sample table. `streams` are for a step that wants more data than it is given:
    `prompts` goes on where the step's own prompts end, and `pretraining` gives batches of `data.pretraining_files`.
    """

    Settings: ClassVar[type] = NoSettings
    data: ClassVar[str] = "prompts"
    """What the loader gives: prompts; demonstrations (prompts with responses); preferences (prompts with a chosen and
    a rejected response); or labelled (prompts with a response that is liked or not)."""

    cost_critics: ClassVar[tuple[str, ...]] = ()
    """Further critics whose scores are to be low: the divergence from the reference adds to their costs."""

    provides: ClassVar[tuple[str, ...] | None] = None
    """Columns for the advantage estimator beside those of rollout and reward: `values`, `baselines`, or none. With
    None the class does not say, and no rule judges `algorithm.advantage` or `data.pretraining_files`."""

    compares_samples: ClassVar[bool] = False
    """The step itself compares the samples of one prompt, whatever the estimator does."""

    reads_pretraining: ClassVar[bool] = False
    """The step takes batches of `data.pretraining_files` from `streams["pretraining"]`."""

    rows_per_prompt: ClassVar[int | None] = None
    """Rows of a batch that come from one of the loader's; None: as many as `rollout.samples_per_prompt`."""

    def __init__(self, roles: Mapping[str, object], *, settings: object, samples_per_prompt: int) -> None:
        for name in role_needs(type(self)):
            setattr(self, name, roles.get(name))
        self.settings = settings
        self.samples_per_prompt = samples_per_prompt
        self.iteration = 0
        self.seed = 0
        self.wants_old_logprobs = True
        self.max_response_tokens: int | None = None
        self.last_batch: BatchRef | None = None
        self.streams: Mapping[str, Stream] = {}

    @classmethod
    def wants_reference(cls, config: Experiment) -> bool:
        """Whether the run needs the role `reference`, where the class annotates it as optional."""
        return config.algorithm.kl.placement is not KLPlacement.none

    @abstractmethod
    def step(self, prompts: Batch) -> Metrics:
        """One iteration on prompts [B] of the loader."""

    def observe(self, prompts: Batch, batch: BatchRef) -> Metrics:
        """Scores and lengths as metrics, after checking that every prompt that entered left."""
        check_unique(prompts.row("uid"))
        check_accounted(prompts.row("uid"), batch.row("uid"), samples_per_prompt=self.samples_per_prompt, stage="step")
        self.last_batch = batch
        return batch_metrics(batch)

    def evaluate(self, held_out: Batch) -> Metrics | None:
        """Metrics of held-out rows of the kind that the dataflow learns from; None: responses are judged instead."""
        return None

    def foreknown(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """Columns that all training and held-out rows get before the first step; none by default.

        Asked once, some rows at a time, of models as they begin, and kept in the run's directory.
        """
        return {}

    def state(self) -> dict[str, object]:
        """What the dataflow itself must remember over a restart (JSON)."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Puts back what `state` gave."""
        assert not state, f"{type(self).__name__} was given a state that it does not restore: {state}"


def role_needs(dataflow: type[Dataflow]) -> dict[str, RoleNeed]:
    """The roles that a dataflow names in its annotations, in order."""
    try:
        hints = get_type_hints(dataflow)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise ConfigError(
            f"An annotation of {dataflow.__name__} cannot be read: {error}.",
            remedy=f"Import what it names. The types of roles are {', '.join(kind.__name__ for kind in ROLE_TYPES)},"
            " from hybridflow.dataflows.roles.",
        ) from error
    needs = {}
    for name, hint in hints.items():
        options = get_args(hint) or (hint,)
        kinds = [option for option in options if option in ROLE_TYPES]
        if kinds:
            needs[name] = RoleNeed(kinds[0], is_optional=NoneType in options)
    return needs


def learns_from_samples(dataflow: type[Dataflow]) -> bool:
    """Whether it learns from responses of its own rollout; elsewhere a rollout only serves the evaluation."""
    return any(need.kind is Sampler and not need.is_optional for need in role_needs(dataflow).values())


def learns_from_preferences(dataflow: type[Dataflow]) -> bool:
    """Whether its policy learns from pairs or labels with the loss of `algorithm.preference`."""
    has_policy = any(need.kind is Policy for need in role_needs(dataflow).values())
    return has_policy and dataflow.data in PREFERENCE_DATA
