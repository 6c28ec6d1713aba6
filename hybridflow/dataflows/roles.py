"""The types of roles: the methods that a dataflow may call. Calls return immediately, with a handle or a future."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import Future
from hybridflow.observability.metrics import Metrics


class Sampler(Protocol):
    """A rollout: prompts in, prompts with responses out."""

    def generate(self, prompts: Batch | BatchRef, purpose: str = "train") -> BatchRef:
        """The prompts, with `response_ids`, `response_mask`, `rollout_logprobs`, `weight_version`, `version_runs`,
        `truncated`."""
        ...


class PartialSampler(Sampler, Protocol):
    """A rollout whose rows may continue from call to call, as the loop uses it."""

    def advance(
        self,
        prompts: BatchRef | None = None,
        *,
        replicas: Sequence[int] = (),
        withdrawn: Sequence[tuple[int, int]] | None = (),
        max_tokens: int | Sequence[int | None] | None,
        yields: bool = False,
        stays_awake: bool = False,
    ) -> BatchRef:
        """Samples tokens of all rows that run, and returns those that have finished.

        Rows of `prompts` begin, each on its replica. `withdrawn` ones (`uid` and `sample_index`; None: all, which are
        then lost) are returned with the tokens that they have. `max_tokens` are the decoding steps of each replica, at
        most. With `yields`, it returns early when another call waits for it.
        """
        ...


class Scorer(Protocol):
    """A reward: one score per response."""

    def score(self, batch: Batch | BatchRef) -> BatchRef:
        """The batch, with `scores` and a column `rewards/<name>` per function or model."""
        ...


class FrozenModel(Protocol):
    """A frozen language model."""

    def logprobs(self, batch: Batch | BatchRef) -> BatchRef:
        """The batch, with `ref_logprobs`."""
        ...


class Trainable(Protocol):
    """A trained role: it can be saved and loaded."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def save(self, directory: Path, in_background: bool) -> Future[None]:
        """Writes the role's part of a checkpoint; in the background, only copies it and begins."""
        ...

    def saved(self, wait: bool) -> Future[None]:
        """Raises the error with which the last `save` has failed, if it has. May wait for its end."""
        ...

    def load(self, directory: Path) -> Future[None]:
        """Reads what `save` wrote."""
        ...

    def snapshot(self) -> BatchRef:
        """A copy of what `save` writes, in the memory of the ranks' nodes: one row per rank."""
        ...

    def roll_back(self, kept: BatchRef) -> Future[None]:
        """Restores a snapshot of the same ranks."""
        ...


class Policy(Trainable, Protocol):
    """The language model being trained."""

    def logprobs(self, batch: Batch | BatchRef) -> BatchRef:
        """The batch, with `old_logprobs`."""
        ...

    def advantages(self, batch: BatchRef) -> BatchRef:
        """The batch, with `rewards` and `advantages` computed from scores alone."""
        ...

    def combine_advantages(self, batch: BatchRef, other: BatchRef, multiplier: float) -> BatchRef:
        """The batch, with its `advantages` combined with those of another batch of the same rows."""
        ...

    def update(self, batch: BatchRef, pretraining: Batch | None = None) -> Future[Metrics]:
        """Updates the policy, optionally on pretraining texts too."""
        ...

    def supervised_step(self, batch: Batch | BatchRef) -> Future[Metrics]:
        """A step on demonstrations."""
        ...

    def preference_step(self, batch: Batch | BatchRef) -> Future[Metrics]:
        """A step on preferences."""
        ...

    def evaluate(self, batch: Batch | BatchRef) -> Future[Metrics]:
        """The metrics of a supervised or preference step on held-out rows, without training on them."""
        ...

    def publish_weights(self, version: int) -> Future[None]:
        """Gives the rollout the trained weights, under a version."""
        ...


class TrainableRewardModel(Trainable, Scorer, Protocol):
    """A reward model being trained."""

    def preference_step(self, batch: Batch | BatchRef) -> Future[Metrics]:
        """A step on pairs of a chosen and a rejected response."""
        ...

    def evaluate(self, batch: Batch | BatchRef) -> Future[Metrics]:
        """The metrics of a step on held-out pairs, without training on them."""
        ...


class ValueFunction(Trainable, Protocol):
    """The critic."""

    def values(self, batch: BatchRef) -> BatchRef:
        """The batch, with `values`."""
        ...

    def advantages(self, batch: BatchRef) -> BatchRef:
        """The batch, with `rewards`, `advantages` and `returns`."""
        ...

    def update(self, batch: BatchRef) -> Future[Metrics]:
        """Fits the values to the returns."""
        ...


ROLE_TYPES = (Sampler, Scorer, FrozenModel, Policy, TrainableRewardModel, ValueFunction)
"""The types that a dataflow may annotate its roles with."""
