"""Groups from which a dataflow would learn nothing: found when their scores are known, and replaced by others."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral

from torch import Tensor

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.groups import Group, GroupQueue
from hybridflow.dataflows.interface import Dataflow
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last

MOST_BATCHES_IN_A_ROW = 100
"""Batches of groups that may be filtered out one after another, or DAPO's `max_refills` if that is larger."""


class GroupFilter:
    """The groups that a dataflow filters out (`Dataflow.filter_out`) before a step trains on them.

    A batch is filtered after the next turn of the rollout, during which it is scored. Generation waits for scores that
    take longer; how long they take does not matter otherwise.

    for group, is_filtered in groups.known(queue, collected): ...
    metrics = groups.end_step(trained=8)
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.is_used = type(dataflow).filter_out is not Dataflow.filter_out
        self._dataflow = dataflow
        self._filtered = self._in_a_row = 0
        """Groups that were filtered out since the last step, and, of these, since one was not."""

        dataflow.filters_ahead = self.is_used

    def known(self, queue: GroupQueue, collected: Mapping[int, BatchRef]) -> Iterator[tuple[Group, bool]]:
        """Each unknown group of the queue, and whether it is filtered out; waits for their scores.

        `collected` has the batch of each.
        """
        unknown, filtered = queue.unknown, dict[int, set[int]]()
        for group in unknown:
            batch = collected[group.uid]
            if id(batch) not in filtered:
                filtered[id(batch)] = self._filtered_out(batch, queue.groups_per_step)
            is_filtered = group.uid in filtered[id(batch)]
            self._filtered += is_filtered
            self._in_a_row = self._in_a_row + 1 if is_filtered else 0
            yield group, is_filtered
        settings = self._dataflow.settings
        refills = settings.max_refills if isinstance(settings, DAPO.Settings) else 0
        if unknown and self._in_a_row > max(MOST_BATCHES_IN_A_ROW, refills) * queue.groups_per_step:
            raise ConfigError(
                f"{self._name} has returned each of the last {self._in_a_row} groups that were sampled, such as the one"
                f" with uid {unknown[-1].uid}. The run cannot continue, because no group is left to train on.",
                remedy="Check which groups filter_out returns, and return fewer once num_filtered is large; or use"
                " prompts whose samples it keeps.",
            )

    def end_step(self, *, trained: int) -> Metrics:
        """A step has trained on some groups. Returns `async/filtered_fraction`, if the dataflow filters."""
        fraction = self._filtered / (self._filtered + trained)
        self.forget()
        return {"async/filtered_fraction": last(fraction)} if self.is_used else {}

    def forget(self) -> None:
        """Forgets the groups that were filtered out."""
        self._filtered = self._in_a_row = 0

    @property
    def _name(self) -> str:
        return f"{type(self._dataflow).__name__}.filter_out"

    def _filtered_out(self, batch: BatchRef, groups_per_step: int) -> set[int]:
        found: object = self._dataflow.filter_out(batch, num_filtered=self._filtered, groups_per_step=groups_per_step)
        if not isinstance(found, Iterable) or isinstance(found, str):
            raise self._error(f"returned {type(found).__name__}")
        uids, known = found.tolist() if isinstance(found, Tensor) else list[object](found), {*batch.row("uid").tolist()}
        for uid in uids:
            if isinstance(uid, bool):
                raise self._error("returned True or False for each row, not the uids of groups")
            if not isinstance(uid, Integral) or uid not in known:
                raise self._error(f"returned {uid!r}, which is not the uid of a group of the batch")
        return known.intersection(uids)

    def _error(self, what: str) -> ConfigError:
        remedy = "Return uids of the batch. Those of the rows where a mask is True are batch.row('uid')[mask].tolist()."
        return ConfigError(f"{self._name} {what}.", remedy=remedy)
