"""Groups from which a dataflow would learn nothing: found when their scores are known, and replaced by others."""

from collections.abc import Iterator, Sequence

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.interface import Dataflow
from hybridflow.observability.metrics import Metrics, last


class GroupFilter:
    """The groups that a dataflow filters out (`Dataflow.filter_out`) before a step trains on them.

    A batch is filtered only after the next turn of the rollout, during which it is scored: generation does not wait for
    the scores, and when they are complete does not matter.

    groups.add(uids, batch)  # as `collect` returned them
    for uid, is_filtered in groups.known(groups_per_step=8): ...
    metrics = groups.end_step(trained=8)
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.is_used = type(dataflow).filter_out is not Dataflow.filter_out
        self._dataflow = dataflow
        self._waiting: list[tuple[Sequence[int], BatchRef]] = []
        self._filtered = 0
        """Groups that were filtered out since the last step."""

        dataflow.filters_ahead = self.is_used

    @property
    def num_waiting(self) -> int:
        """Groups that have been added and are not known yet."""
        return sum(len(uids) for uids, _ in self._waiting)

    def add(self, uids: Sequence[int], batch: BatchRef) -> None:
        """Adds the groups of a batch; does nothing if the dataflow does not filter."""
        if self.is_used:
            self._waiting.append((uids, batch))

    def known(self, *, groups_per_step: int) -> Iterator[tuple[int, bool]]:
        """Each group that was added, and whether it is filtered out; waits for their scores."""
        waiting, self._waiting = self._waiting, []
        for uids, batch in waiting:
            filtered = {*self._dataflow.filter_out(batch, num_batches=self._filtered / groups_per_step)}
            self._filtered += len(filtered)
            yield from ((uid, uid in filtered) for uid in uids)

    def end_step(self, *, trained: int) -> Metrics:
        """A step has trained on some groups. Returns `async/filtered_fraction`, if the dataflow filters."""
        fraction, self._filtered = self._filtered / (self._filtered + trained), 0
        return {"async/filtered_fraction": last(fraction)} if self.is_used else {}

    def forget(self) -> None:
        """Forgets all groups: they are generated again."""
        self._waiting.clear()
        self._filtered = 0
