"""A failure as a person at a terminal reads it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hybridflow.errors import HybridflowError, WorkerError, explained
from hybridflow.observability.redaction import redacted_text


def say_failure(console: Console, error: HybridflowError, *, report: Path | None = None) -> None:
    """What was found and what to do; of a failure in a worker also where, and its traceback where we cannot explain."""
    told = explained(error)
    console.print(Text.assemble((f"{type(told).__name__}: ", "bold red"), redacted_text(told.message)))
    console.print(Text.assemble(("What to do: ", "bold"), redacted_text(told.remedy)))
    if isinstance(error, WorkerError):
        console.print(Text(f"role={error.role} rank={error.rank} node={error.node} method={error.method}", "bold"))
        if told is error:
            console.print(Text(redacted_text(error.worker_traceback.rstrip()), "dim"))
    if report is not None and report.is_file():
        console.print(f"  report      {from_here(report)}", soft_wrap=True)


def say_problems(found: Sequence[HybridflowError], console: Console, *, begin: int = 0) -> None:
    """The problems from the one at `begin` on, numbered."""
    for number, error in enumerate(found[begin:], begin + 1):
        console.print(f"{number}. ", end="")
        say_failure(console, error)


def from_here(path: Path) -> Path:
    """The path as it is shortest to type: relative to the current directory where it lies below that."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
