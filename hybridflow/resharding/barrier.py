"""A barrier over a shared store that names the ranks that are missing."""

# pyright: reportPrivateImportUsage=false

import time
from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from hybridflow.errors import HybridflowError, ResourceError, error_from, error_text

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0002, 0.02
"""Between two polls of the store."""

GRACE_SECONDS = 2.0
"""How long the remaining ranks have to report, once one of them has lost a peer."""

REMEDY = "Check that rank's log: it ended or hangs. If it is only slow, raise rollout.transfer.timeout_seconds."
CANCELLED = "See the fault or the signal before it; the driver connects the ranks again if the run continues."
ALL_ARRIVED = "all ranks arrived"


class Barrier:
    """All ranks wait for one another at each stage; if one does not arrive in time, the others raise its name.

        barrier = Barrier(store, rank, ["rank 0", "rank 1"], timeout_seconds=300)
        barrier.wait("the transfer of version 7")
        ...
        barrier.wait("the end of the transfer of version 7")

    A rank that cannot do its part calls `peer_error` or `fail` instead of `wait`; the others then raise the same error.
    So they do if `is_cancelled` returns true on a rank that waits, because the driver no longer wants its call.
    All ranks pass the same stages in the same order.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        names: Sequence[str],
        *,
        timeout_seconds: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._rank = rank
        self.names = list(names)
        """Names of the ranks in errors."""
        self._timeout_seconds = timeout_seconds
        self._is_cancelled = is_cancelled
        self._number = 0

    def wait(self, stage: str) -> None:
        """Waits for all ranks. Raises the error of a rank that failed, or one that names the ranks that are missing."""
        try:
            self.report_alive()
            if self._store.add(self._key("count"), 1) == len(self.names):
                self._decide(ALL_ARRIVED)
            if not self._is_decided(time.monotonic() + self._timeout_seconds):
                late = f"did not reach {stage} within {self._timeout_seconds:g} s"
                self._decide(error_text(self._missing(self._absent(), late)))
            if self._store.get(self._key("outcome")) != ALL_ARRIVED.encode():
                raise self._outcome()
            self._clear_previous_stage()
        except dist.DistNetworkError as error:
            raise _store_gone(stage) from error
        self._number += 1

    def report_alive(self) -> None:
        """Records that this rank is alive, so that no other rank reports it as missing."""
        self._store.set(self._key(str(self._rank)), "")

    def peer_error(self, stage: str, peers: Iterable[int], reason: str) -> HybridflowError:
        """The error to raise when `peers` did not answer; the same on every rank. Call `report_alive` first.

        Names those of `peers` that have not reported. If all of them have, each waits for another rank in turn: then it
        names every rank that has not.
        """
        try:
            self._is_decided(time.monotonic() + GRACE_SECONDS)
            absent = self._absent()
            missing = [peer for peer in absent if peer in set(peers)] or absent
            self._decide(error_text(self._missing(missing, f"left {stage} unfinished ({reason})")))
            return self._outcome()
        except dist.DistNetworkError as error:
            gone = _store_gone(stage)
            gone.__cause__ = error
            return gone

    def fail(self, error: HybridflowError) -> None:
        """Reports that this rank failed: all others raise `error`."""
        self.report_alive()
        self._decide(error_text(error))

    def _absent(self) -> list[int]:
        return [rank for rank in range(len(self.names)) if not self._store.check([self._key(str(rank))])]

    def _decide(self, outcome: str) -> None:
        """Settles how the stage ends for all ranks, unless it is settled already."""
        self._store.compare_set(self._key("outcome"), "", outcome)

    def _is_decided(self, deadline: float) -> bool:
        """Polls for the outcome: a blocking wait on the store could not be interrupted."""
        pause = SHORTEST_PAUSE_SECONDS
        while not self._store.check([self._key("outcome")]):
            if time.monotonic() > deadline:
                return False
            if self._is_cancelled():
                self._decide(error_text(ResourceError("The transfer of weights was cancelled.", remedy=CANCELLED)))
                continue
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def _outcome(self) -> HybridflowError:
        """The error that ended the stage, parsed from text, so that nothing in the store can run as code."""
        found = self._store.get(self._key("outcome"))
        try:
            return error_from(found.decode())
        except ValueError:
            return ResourceError(
                f"The store of the ranks' barrier holds {len(found)} bytes under '{self._key('outcome')}' that no rank"
                " of this run wrote.",
                remedy="Restrict access to the network between the nodes, then resume.",
            )

    def _missing(self, ranks: list[int], what: str) -> ResourceError:
        if not ranks:
            return ResourceError(
                f"All ranks are alive, but connections between them broke: {what}.",
                remedy="Check the network between their nodes, and their logs.",
            )
        named = ", ".join(self.names[rank] for rank in ranks)
        return ResourceError(f"{named[0].upper()}{named[1:]} {what}.", remedy=REMEDY)

    def _clear_previous_stage(self) -> None:
        """Deletes the keys of the previous stage, which every rank has left by now."""
        names = [str(self._rank)] + (["count", "outcome"] if self._rank == 0 else [])
        for name in names if self._number else []:
            self._store.delete_key(f"{self._number - 1}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def _store_gone(stage: str) -> ResourceError:
    return ResourceError(
        f"The store of the ranks' barrier did not answer at {stage}: the process that serves it, rank 0 or the driver,"
        " has ended.",
        remedy=REMEDY,
    )
