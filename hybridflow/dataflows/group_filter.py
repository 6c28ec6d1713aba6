"""Groups from which a dataflow would learn nothing: found when their scores are known, and replaced by others."""

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from torch import Tensor

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.groups import Group, GroupQueue
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last

MOST_BATCHES_IN_A_ROW = 100
"""Batches of groups that may be filtered out one after another."""


class GroupFilter:
    """The groups that a dataflow filters out (`Dataflow.filter_out`) before a step trains on them.

    A batch is filtered after the next turn of the rollout, during which it is scored. Generation waits for scores that
    take longer; how long they take does not matter otherwise.

    groups.add(uids, batch)  # as `collect` returned them
    for group, is_filtered in groups.known(queue): ...
    metrics = groups.end_step(trained=8)
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.is_used = type(dataflow).filter_out is not Dataflow.filter_out
        self._dataflow = dataflow
        self._waiting: list[tuple[Sequence[int], BatchRef]] = []
        self._filtered = self._in_a_row = 0
        """Groups that were filtered out since the last step, and since one was not."""

        dataflow.filters_ahead = self.is_used

    @property
    def num_waiting(self) -> int:
        """Groups that have been added and are not known yet."""
        return sum(len(uids) for uids, _ in self._waiting)

    def add(self, uids: Sequence[int], batch: BatchRef) -> None:
        """Adds groups of a batch; does nothing if the dataflow does not filter."""
        if self.is_used and uids:
            self._waiting.append((uids, batch))

    def known(self, queue: GroupQueue) -> Iterator[tuple[Group, bool]]:
        """Each added group that is still in the queue, and whether it is filtered out; waits for their scores."""
        waiting, self._waiting = self._waiting, []
        for uids, batch in waiting:
            filtered = self._filtered_out(batch, queue.groups_per_step)
            for group in (queue.groups[uid] for uid in uids if uid in queue.groups):
                is_filtered = group.uid in filtered
                self._filtered += is_filtered
                self._in_a_row = self._in_a_row + 1 if is_filtered else 0
                yield group, is_filtered
        if waiting and self._in_a_row >= MOST_BATCHES_IN_A_ROW * queue.groups_per_step:
            raise ConfigError(
                f"{self._name} has filtered out {self._in_a_row} groups one after another. The run cannot continue,"
                " because no group is left to train on.",
                remedy="Use prompts whose samples have different scores. In filter_out, return fewer groups once"
                " num_filtered is large.",
            )

    def end_step(self, *, trained: int) -> Metrics:
        """A step has trained on some groups. Returns `async/filtered_fraction`, if the dataflow filters."""
        fraction, self._filtered = self._filtered / (self._filtered + trained), 0
        return {"async/filtered_fraction": last(fraction)} if self.is_used else {}

    def forget(self) -> None:
        """Forgets all groups: they are generated again."""
        self._waiting.clear()
        self._filtered = self._in_a_row = 0

    @property
    def _name(self) -> str:
        return f"{type(self._dataflow).__name__}.filter_out"

    def _filtered_out(self, batch: BatchRef, groups_per_step: int) -> set[int]:
        found: object = self._dataflow.filter_out(batch, num_filtered=self._filtered, groups_per_step=groups_per_step)
        if not isinstance(found, Iterable) or isinstance(found, str):
            raise self._error(f"returned {type(found).__name__}")
        uids = {*(found.tolist() if isinstance(found, Tensor) else cast(Iterable[int], found))}
        if unknown := uids - {*batch.row("uid").tolist()}:
            raise self._error(f"returned {next(iter(unknown))!r}, which is not the uid of a group of the batch")
        return uids

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name} {what}.", remedy="Return uids of the batch: batch.row('uid')[...].tolist().")
