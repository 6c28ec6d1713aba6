"""A check of this machine, as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridflow.doctor.finding import Finding


@dataclass(frozen=True)
class Place:
    """Where a check works."""

    scratch: Path
    """A directory of its own, deleted afterwards."""

    run_dir: Path
    """Where runs will write."""

    doing: Callable[[str], None]
    """Receives what the check is doing, for the progress line, and for the message if it hangs or crashes there."""


@dataclass(frozen=True)
class Check:
    """A check, which runs in a process of its own.

    `run` yields a finding as soon as it has one. It imports what it examines itself, so that declaring a check imports
    nothing, and need not catch exceptions: one that it raises is a problem of its last step.
    """

    name: str
    doing: str
    """The progress line until the check says more."""

    run: Callable[[Place], Iterator[Finding]]
    seconds: float = 30.0
    """When it counts as hanging."""

    needs: tuple[str, ...] = ()
    """Checks without which it cannot succeed; it is skipped if one of them has a problem."""

    is_micro_run: bool = False
    """Whether it trains a model; `--quick` leaves it out."""
