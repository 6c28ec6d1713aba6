"""The rollout of a dataflow whose `collect` gets the samples of groups when they have finished."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from hybridflow.batch import Batch
from hybridflow.batch.row_names import RowName, row_names
from hybridflow.controller.backends.interface import Backend
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.interface import Dataflow, collected, role_needs
from hybridflow.dataflows.roles import Sampler
from hybridflow.errors import ConfigError

Place = tuple[BatchRef, int]
"""A batch of finished rows, and a position in it."""


class _Asked(BaseException):
    """`collect` has asked for samples. Not an `Exception`, which code of the user might catch."""

    def __init__(self, rows: BatchRef) -> None:
        super().__init__()
        self.rows = rows


class GroupSampler:
    """Stands for the rollout in a dataflow.

    `collect` is called twice for each group. In `asked`, it ends at its first `generate`, whose rows are returned. In
    `answered`, that call returns the finished rows, and the rest of `collect` runs. All other calls go to the rollout.
    """

    def __init__(
        self, dataflow: Dataflow, sampler: Sampler, backend: Backend, after_generate: Callable[[], None]
    ) -> None:
        """`after_generate` is called after each call that goes to the rollout."""
        self._dataflow = dataflow
        self._sampler = sampler
        self._backend = backend
        self._after_generate = after_generate
        self._answer: Callable[[BatchRef], BatchRef] | None = None

    def generate(self, prompts: Batch | BatchRef, purpose: str = "train") -> BatchRef:
        """See `Sampler.generate`."""
        answer = self._answer
        if answer is None:
            found = self._sampler.generate(prompts, purpose)
            self._after_generate()
            return found
        if purpose != "train":
            raise _not_first(self._dataflow, f"calls rollout.generate(purpose={purpose!r}) first")
        self._answer = None
        return answer(prompts if isinstance(prompts, BatchRef) else BatchRef.of(prompts, self._backend))

    def asked(self, prompts: Batch) -> BatchRef:
        """The rows that `collect` asks for. Raises `ConfigError` if they are not samples of the prompts."""

        def ask(rows: BatchRef) -> BatchRef:
            raise _Asked(rows)

        try:
            with self._answering(ask):
                collected(self._dataflow, prompts)
        except _Asked as asked:
            rows = asked.rows
        else:
            raise _not_first(self._dataflow, "does not call rollout.generate")
        names = row_names(rows)
        if {uid for uid, _ in names} != set(prompts.row("uid").tolist()) or len(set(names)) < len(names):
            raise ConfigError(
                f"{type(self._dataflow).__name__}.collect asks the rollout for {len(names)} rows, which are not samples"
                f" of the {len(prompts)} prompts, each once.",
                remedy="Pass prompts.repeat(self.samples_per_prompt) to self.rollout.generate, or use"
                " asynchrony.partial_rollouts=false.",
            )
        return rows

    def answered(self, prompts: Batch, finished: Mapping[RowName, Place]) -> BatchRef:
        """The batch that `collect` returns for prompts whose rows have finished."""

        def answer(rows: BatchRef) -> BatchRef:
            return rows.join(rows_at([finished[name] for name in row_names(rows)]))

        with self._answering(answer):
            return collected(self._dataflow, prompts)

    @contextmanager
    def _answering(self, answer: Callable[[BatchRef], BatchRef]) -> Iterator[None]:
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None


def sampler_of(dataflow: type[Dataflow]) -> str:
    """The name of the role that samples."""
    return next(name for name, need in role_needs(dataflow).items() if need.kind is Sampler)


def rows_of_groups(batches: Sequence[BatchRef], uids: Sequence[int]) -> BatchRef:
    """The rows of some groups from batches that `collect` has returned, in the order of `uids`, with companions."""
    place = {uid: number for number, uid in enumerate(uids)}
    parts, order = [], []
    for batch in batches:
        known = [place.get(uid, -1) for uid in batch.row("uid").tolist()]
        rows = [row for row, number in enumerate(known) if number >= 0]
        if rows:
            parts.append(batch.take(rows))
            order += [known[row] for row in rows]
    found = BatchRef.concat(parts).take(torch.tensor(order).argsort(stable=True))
    companions = {
        name: rows_of_groups([batch.companions[name] for batch in batches], uids) for name in batches[0].companions
    }
    return found.with_companions(**companions) if companions else found


def rows_at(places: Sequence[Place]) -> BatchRef:
    """The rows at some places, in that order."""
    batches = list({id(batch): batch for batch, _ in places}.values())
    starts, start = {}, 0
    for batch in batches:
        starts[id(batch)] = start
        start += len(batch)
    return BatchRef.concat(batches).take([starts[id(batch)] + row for batch, row in places])


def _not_first(dataflow: Dataflow, what: str) -> ConfigError:
    return ConfigError(
        f"asynchrony.partial_rollouts=true: {type(dataflow).__name__}.collect {what}.",
        remedy="Begin collect with the samples to train on: self.rollout.generate("
        "prompts.repeat(self.samples_per_prompt)); or use asynchrony.partial_rollouts=false.",
    )
