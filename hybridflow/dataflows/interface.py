"""The base class of dataflows: roles, settings, and the two halves of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import ClassVar, Protocol, get_args, get_type_hints

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.accounting import check_groups
from hybridflow.config.algorithm import KLPlacement
from hybridflow.config.experiment import Experiment
from hybridflow.config.roles import DescribesRoles
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.roles import ROLE_TYPES, Policy, Sampler
from hybridflow.dataflows.stages import batch_metrics
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics

PREFERENCE_DATA = ("preferences", "labelled")
"""Kinds of data (`Dataflow.data`) with preferences: pairs of responses, and labeled ones."""

DATA_KINDS = ("prompts", "demonstrations", *PREFERENCE_DATA)
"""All kinds of data."""


class BatchStream(Protocol):
    """An endless stream of batches; checkpoints keep its position."""

    def next(self) -> Batch:
        """The next batch."""
        ...


@dataclass(frozen=True)
class RoleNeed:
    """The type of a role that a dataflow names, and whether it is optional."""

    kind: type
    is_optional: bool


@dataclass
class NoSettings:
    """The settings of a dataflow that has none."""


class Dataflow(DescribesRoles):
    """A program over roles. A subclass annotates its roles and implements `collect` and `learn`, or only `step`.

        class BestOfTwo(Dataflow):
            actor: Policy
            rollout: Sampler
            reward: Scorer
            reference: FrozenModel | None      # None unless the configuration needs it
            style: Scorer
            roles: ClassVar = {"style": {"kind": "reward_function", "functions": ["format"]}}     # roles.style=...

            @dataclass
            class Settings:
                threshold: float = 0.5      # dataflow_settings.threshold=0.7

            def collect(self, prompts): ...

            def learn(self, batch): ...

    `iteration` counts finished steps, and `seed` is the run's: random numbers derived from these two are the same in a
    resumed run. `max_response_tokens` limits the length of responses. `wants_old_logprobs` says whether an update needs
    `actor.logprobs` (`algorithm.old_logprobs`), and `filters_ahead` whether the loop calls `filter_out`. `last_batch`
    is the last argument of `observe`, for the sample table; `observed` and `unused` have all batches that the step has
    passed to it. `streams` are for a step that needs more data: `prompts` continues after the step's own prompts, and
    `pretraining` yields batches of `data.pretraining_files`.
    """

    Settings: ClassVar[type] = NoSettings
    data: ClassVar[str] = "prompts"
    """The kind of rows that the loader yields: `prompts`; `demonstrations` (prompts with responses); `preferences`
    (prompts with a chosen and a rejected response); `labelled` (prompts with a response labeled desirable or not)."""

    cost_critics: ClassVar[tuple[str, ...]] = ()
    """Critics of costs, which should be low: the KL penalty is added to their costs."""

    provides: ClassVar[tuple[str, ...] | None] = None
    """Further columns for the advantage estimator: `values`, `baselines`, or none. With None, the rules for
    `algorithm.advantage` and `data.pretraining_files` are skipped."""

    compares_samples: ClassVar[bool] = False
    """The step itself compares the samples of a prompt, whatever the estimator does."""

    reads_pretraining: ClassVar[bool] = False
    """The step reads batches of `data.pretraining_files` from `streams["pretraining"]`."""

    rows_per_prompt: ClassVar[int | None] = None
    """Rows of a training batch per row of the loader; None means `rollout.samples_per_prompt`."""

    def __init__(self, roles: Mapping[str, object], *, settings: object, samples_per_prompt: int) -> None:
        for name in role_needs(type(self)):
            setattr(self, name, roles.get(name))
        self.settings = settings
        self.samples_per_prompt = samples_per_prompt
        self.iteration = 0
        self.seed = 0
        self.wants_old_logprobs = True
        self.filters_ahead = False
        self.max_response_tokens: int | None = None
        self.last_batch: BatchRef | None = None
        self.observed: list[BatchRef] = []
        self.unused: list[BatchRef] = []
        self.streams: Mapping[str, BatchStream] = {}

    @classmethod
    def wants_reference(cls, config: Experiment, settings: object) -> bool:
        """Whether the run with these `Settings` needs the role `reference`, if the class annotates it as optional."""
        return config.algorithm.kl.placement is not KLPlacement.none

    def step(self, prompts: Batch) -> Metrics:
        """One iteration on a batch [B] of the loader: `learn(collect(prompts))`."""
        return self.learn(collected(self, prompts))

    def collect(self, prompts: Batch) -> BatchRef:
        """Samples of the prompts [B] and their scores: what depends on the rollout's weights, but on nothing that
        `learn` changes. With `asynchrony.max_staleness`, it is called before `learn` has seen earlier batches; with
        `asynchrony.partial_rollouts`, for a few prompts at a time, and it must begin by calling `rollout.generate`."""
        raise NotImplementedError(f"{type(self).__name__} does not define collect")

    def learn(self, batch: BatchRef) -> Metrics:
        """Updates the models on what `collect` returned, and publishes the weights."""
        raise NotImplementedError(f"{type(self).__name__} does not define learn")

    def filter_out(self, batch: BatchRef, *, num_filtered: int, groups_per_step: int) -> Sequence[int]:
        """Groups, by their `uid`, of a batch of `collect` from which `learn` would learn nothing; none by default.

        With `asynchrony.partial_rollouts`, the loop discards them, and others begin in their place. `num_filtered`
        groups were discarded since the last step; a step trains on `groups_per_step`.
        """
        return ()

    def observe(self, batch: BatchRef, *, unused: BatchRef | None = None) -> Metrics:
        """Metrics of scores and lengths of a batch, which has all generated rows except `unused` ones.

        Raises `BatchError` if a prompt's samples are not complete, or occur twice; after the step, the loop compares
        all prompts with those it has drawn.
        """
        rows = [batch.row("uid"), *([] if unused is None else [unused.row("uid")])]
        check_groups(torch.cat(rows), samples_per_prompt=self.samples_per_prompt)
        self.observed.append(batch)
        self.unused += [] if unused is None else [unused]
        self.last_batch = batch
        return batch_metrics(batch)

    def forget_observed(self) -> None:
        """Clears the observed batches at the beginning of a step."""
        self.observed.clear()
        self.unused.clear()

    def evaluate(self, held_out: Batch) -> Metrics | None:
        """Metrics of held-out rows of `data`; None if responses are sampled and scored instead."""
        return None

    def precompute(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """Columns to add to all training and held-out rows before the first step; none by default.

        Called once per part of the data, with the initial models; the columns are kept in the run's directory.
        """
        return {}

    def state(self) -> dict[str, object]:
        """The dataflow's own state for a checkpoint (JSON)."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Restores what `state` returned."""
        assert not state, f"{type(self).__name__} was given a state that it does not restore: {state}"


def collected(dataflow: Dataflow, prompts: Batch) -> BatchRef:
    """The batch that `dataflow.collect` returns; raises `ConfigError` for anything but a batch."""
    batch = dataflow.collect(prompts)
    if not isinstance(batch, BatchRef):
        raise ConfigError(
            f"{type(dataflow).__name__}.collect returned {type(batch).__name__}, not a batch.",
            remedy="Return the samples: return self.reward.score(self.rollout.generate(...)).",
        )
    return batch


def is_in_halves(dataflow: type[Dataflow]) -> bool:
    """Whether a step is `learn(collect(prompts))`, so that `collect` may be called ahead."""
    return dataflow.step is Dataflow.step


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
    """Whether the dataflow learns from samples of its rollout; otherwise the rollout is only for the evaluation."""
    needs = role_needs(dataflow).values()
    has_policy = any(need.kind is Policy for need in needs)
    return has_policy and any(need.kind is Sampler and not need.is_optional for need in needs)


def learns_from_preferences(dataflow: type[Dataflow]) -> bool:
    """Whether the policy learns from pairs or labeled responses, with the loss of `algorithm.preference`."""
    has_policy = any(need.kind is Policy for need in role_needs(dataflow).values())
    return has_policy and dataflow.data in PREFERENCE_DATA
