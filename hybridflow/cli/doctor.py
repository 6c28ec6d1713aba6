"""`hybridflow doctor [RUN_DIR]`: examines this machine, or the directory of a run, and says what to do."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.text import Text

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals
from hybridflow.observability.printable import PlainConsole

if TYPE_CHECKING:
    from hybridflow.doctor.finding import Finding

_DESCRIPTION = """Without RUN_DIR, examines this machine: versions, devices, memory, links, ports, disks, Ray,
collectives, a round trip of weights, and a run of two steps with each installed engine. Each check has a process of
its own and a time limit. With RUN_DIR, says what happened to a run that was killed, failed, hangs or still runs, and
how to resume it. The exit status is 1 if there is a problem."""
_EXAMPLES = """examples:
  hybridflow doctor                                 two to five minutes
  hybridflow doctor --quick                         without the runs
  RAY_ADDRESS=10.0.0.1:6379 hybridflow doctor       tries every node of this cluster
  hybridflow doctor --only ray gloo
  hybridflow doctor runs/calculator                 what happened to this run
  hybridflow doctor runs/calculator --json
"""
_RUNS = "runs"
_HEALTHY = "This machine is ready: hybridflow ppo trains the built-in model."
_QUICK = "Nothing is wrong. Without --quick, hybridflow doctor also trains with each engine."
_CHOSEN = "Nothing is wrong in these checks."


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the commands."""
    summary = "examine this machine, or what happened to a run"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run, checks_builds=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="the directory of a run")
    parser.add_argument("--quick", action="store_true", help="no runs; of a RUN_DIR, only the sizes of saved files")
    parser.add_argument("--only", metavar="CHECK", nargs="+", help="only these checks of the machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run(arguments: argparse.Namespace, console: Console) -> int:
    with ended_by_signals():
        from hybridflow.doctor.finding import Finding
        from hybridflow.doctor.finding import Status as Found
        from hybridflow.doctor.text import as_json, conclusion, line

    healthy, found = _QUICK if arguments.quick else _CHOSEN if arguments.only else _HEALTHY, list[Finding]()
    progress = _Progress(console)
    if arguments.run_dir is not None:
        healthy = "Nothing is wrong with this run."
        findings = _of_run(arguments, progress)
    else:
        findings = _of_machine(arguments, progress)
    out = PlainConsole(highlight=False, soft_wrap=True)
    with progress:
        for finding in findings:
            found.append(finding)
            if not arguments.json:
                progress.print(out, line(finding))
    if arguments.json:
        sys.stdout.write(as_json(found))
    else:
        out.print(conclusion(found, healthy))
    return int(any(finding.status is Found.problem for finding in found))


def _of_machine(arguments: argparse.Namespace, progress: "_Progress") -> Iterator["Finding"]:
    with ended_by_signals():
        from hybridflow.doctor.checks.all import CHECKS
        from hybridflow.doctor.examination import examine

    if arguments.only and arguments.quick:
        raise ConfigError("--only already names the checks, so --quick has no effect.", remedy="Leave one of them out.")
    checks = [check for check in CHECKS if not (arguments.quick and check.is_micro_run)]
    if arguments.only:
        _check_names(arguments.only, [check.name for check in CHECKS])
        checks = [check for check in CHECKS if _matches(check.name, arguments.only)]
    return examine(checks, Path(_RUNS), progress.doing)


def _check_names(words: Sequence[str], names: Sequence[str]) -> None:
    for word in words:
        if not any(_matches(name, [word]) for name in names):
            raise ConfigError(
                f"There is no check '{word}'.",
                remedy=f"{did_you_mean(word, names)}Checks: {', '.join(names)}; or a first word, such as run.",
            )


def _matches(name: str, words: Sequence[str]) -> bool:
    return any(name == word or name.startswith(f"{word} ") for word in words)


def _of_run(arguments: argparse.Namespace, progress: "_Progress") -> Iterator["Finding"]:
    with ended_by_signals():
        from hybridflow.doctor.run.all import examine_run
        from hybridflow.observability.logs import configure_logging

    configure_logging(None, logging.ERROR)  # damaged lines and checkpoints are findings
    if arguments.only:
        raise ConfigError(
            f"--only chooses checks of the machine, and {arguments.run_dir} is a run.",
            remedy="Leave out --only, or RUN_DIR. Write --only last: it takes all words after it.",
        )
    return examine_run(arguments.run_dir, is_quick=arguments.quick, on_doing=progress.doing)


class _Progress:
    """The line that says what is being done, on a terminal; lines of results are printed above it."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("") if console.is_terminal else nullcontext()

    def __enter__(self) -> "_Progress":
        self._status.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.__exit__(None, None, None)

    def doing(self, what: str) -> None:
        """Replaces the line."""
        if isinstance(self._status, Status):
            self._status.update(f"{what} ...")

    def print(self, out: Console, line: Text) -> None:
        """Prints a line to `out`, which may be the same terminal."""
        if isinstance(self._status, Status):
            self._status.stop()
        out.print(line)
        if isinstance(self._status, Status):
            self._status.start()
