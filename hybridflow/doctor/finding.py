"""A finding: one line of a diagnosis, and what to do about it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum


class Status(Enum):
    """How bad a finding is."""

    ok = "ok"
    skipped = "skipped"
    warning = "warning"
    problem = "problem"


@dataclass(frozen=True)
class Finding:
    """A finding of a check."""

    status: Status
    name: str
    found: str
    remedy: str = ""
    """The action to take; a command, if one is enough."""

    details: tuple[str, ...] = ()
    """Further lines: the last output of a process that failed."""


def plain(finding: Finding) -> Mapping[str, object]:
    """A finding as JSON has it."""
    return asdict(finding) | {"status": finding.status.value}


def said(error: BaseException) -> str:
    """The first line of an exception's message."""
    return (str(error).strip() or "no message").splitlines()[0]


def ok(name: str, found: str, remedy: str = "") -> Finding:
    """Something that is as it should be. A remedy is advice, which is given last."""
    return Finding(Status.ok, name, found, remedy)


def skipped(name: str, found: str) -> Finding:
    """Something that was not examined, and why."""
    return Finding(Status.skipped, name, found)


def warning(name: str, found: str, remedy: str = "") -> Finding:
    """Something that makes some runs slow or fail."""
    return Finding(Status.warning, name, found, remedy)


def problem(name: str, found: str, remedy: str = "", details: Sequence[str] = ()) -> Finding:
    """Something that makes runs fail, or that made a run fail."""
    return Finding(Status.problem, name, found, remedy, tuple(details))


def what_to_do(findings: Iterable[Finding]) -> list[str]:
    """The remedies, each once: those of problems first, then of warnings, then advice, each in the order of checks.

    Checks are ordered so that an earlier problem may be the cause of later ones.
    """
    found = sorted(findings, key=lambda each: -list(Status).index(each.status))
    return list(dict.fromkeys(each.remedy for each in found if each.remedy))
