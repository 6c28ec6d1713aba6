"""Ranks sign in a store at each stage of a transfer, so that one that is missing can be named."""

# pyright: reportPrivateImportUsage=false

import time
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from hybridflow.errors import HybridflowError, ResourceError, error_from, error_text

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0002, 0.02
"""Between two questions to the store."""

GRACE_SECONDS = 2.0
"""How long ranks that are alive may take to sign, once one of them has lost another."""

REMEDY = "See that rank's log: it ended, or hangs. If it is only slow, raise rollout.transfer.timeout_seconds."
EVERYBODY_CAME = "everybody came"


class RollCall:
    """All ranks sign a stage, and go on when all have; those that do not come in time are named to all others.

        roll = RollCall(store, rank, ["rank 0", "rank 1"], timeout_seconds=300)
        roll.meet("the transfer of version 7")
        ...
        roll.meet("the end of the transfer of version 7")

    A rank that cannot do its part signs with `lost` or `fail` in place of `meet`; the others then raise the same error.
    Stages are the same, in the same order, on every rank.
    """

    def __init__(self, store: dist.Store, rank: int, names: Sequence[str], *, timeout_seconds: float) -> None:
        self._store = store
        self._rank = rank
        self.names = list(names)
        """Of the ranks, as errors call them."""
        self._timeout_seconds = timeout_seconds
        self._number = 0

    def meet(self, stage: str) -> None:
        """Waits for all ranks; raises what a rank that failed said, or names those that did not come."""
        try:
            self._sign()
            if self._store.add(self._key("count"), 1) == len(self.names):
                self._publish(EVERYBODY_CAME)
            if not self._is_decided(time.monotonic() + self._timeout_seconds):
                late = f"did not come to {stage} within {self._timeout_seconds:g} s"
                self._publish(error_text(self._missing(self._unsigned(), late)))
            self._raise_verdict()
            self._forget()
        except dist.DistNetworkError as error:
            raise _store_gone(stage) from error
        self._number += 1

    def sign_lost(self) -> None:
        """Signs that this rank waited in vain, so that it is not taken for one that does not answer."""
        self._sign()

    def lost(self, stage: str, peers: Iterable[int], reason: str) -> HybridflowError:
        """What to raise for having waited in vain for `peers`, after `sign_lost`; the same on every rank.

        Who is alive signs too. Among those who do not, the peers are named, or else all of them: whom a rank waits
        for may itself be waiting.
        """
        try:
            self._is_decided(time.monotonic() + GRACE_SECONDS)
            unsigned = self._unsigned()
            missing = [peer for peer in unsigned if peer in set(peers)] or unsigned
            self._publish(error_text(self._missing(missing, f"left {stage} unfinished ({reason})")))
            return self._verdict()
        except dist.DistNetworkError as error:
            gone = _store_gone(stage)
            gone.__cause__ = error
            return gone

    def fail(self, error: HybridflowError) -> None:
        """Signs that this rank failed: all others raise `error`."""
        self._sign()
        self._publish(error_text(error))

    def _sign(self) -> None:
        self._store.set(self._key(str(self._rank)), "")

    def _unsigned(self) -> list[int]:
        return [rank for rank in range(len(self.names)) if not self._store.check([self._key(str(rank))])]

    def _publish(self, verdict: str) -> None:
        """Settles how the stage ends, for all ranks, unless it is settled; the first verdict holds."""
        self._store.compare_set(self._key("verdict"), "", verdict)

    def _is_decided(self, deadline: float) -> bool:
        """Waits for the verdict; by asking again, since a store that waits cannot be interrupted."""
        pause = SHORTEST_PAUSE_SECONDS
        while not self._store.check([self._key("verdict")]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_SECONDS)
        return True

    def _raise_verdict(self) -> None:
        if self._store.get(self._key("verdict")) != EVERYBODY_CAME.encode():
            raise self._verdict()

    def _verdict(self) -> HybridflowError:
        """The verdict on this stage, parsed from text, so that nothing in the store can run as code."""
        found = self._store.get(self._key("verdict"))
        try:
            return error_from(found.decode())
        except ValueError:
            return ResourceError(
                f"The store where the ranks meet holds {len(found)} bytes under '{self._key('verdict')}' that no rank"
                " of this run wrote.",
                remedy="Keep strangers off the network between the nodes (docs/how_to/security.md), then resume.",
            )

    def _missing(self, ranks: list[int], what: str) -> ResourceError:
        if not ranks:
            return ResourceError(
                f"All ranks are alive, but connections between them broke: {what}.",
                remedy="See the network between their nodes, and their logs.",
            )
        named = ", ".join(self.names[rank] for rank in ranks)
        return ResourceError(f"{named[0].upper()}{named[1:]} {what}.", remedy=REMEDY)

    def _forget(self) -> None:
        """Deletes what was signed at the stage before: all ranks have left it, since all came to this one."""
        names = [str(self._rank)] + (["count", "verdict"] if self._rank == 0 else [])
        for name in names if self._number else []:
            self._store.delete_key(f"{self._number - 1}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"


def _store_gone(stage: str) -> ResourceError:
    return ResourceError(
        f"At {stage} the store through which the ranks meet did not answer: the process that serves it, rank 0 or the"
        " driver, has ended.",
        remedy=REMEDY,
    )
