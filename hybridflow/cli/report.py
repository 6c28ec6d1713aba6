"""`hybridflow report RUN_DIR`: the report of a run, at any time."""

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Writes report.html into the directory of a run, from what it has logged so far: curves, where the time
went, samples, and how the run ended. A run writes it at each evaluation and checkpoint, and when it ends; this
command is for the time in between, and for runs that were killed."""
_EXAMPLES = """examples:
  hybridflow report runs/calculator                 while it runs, or after it was killed
  hybridflow report runs/first runs/second          one page in each directory
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `report` to the commands."""
    summary = "write the report of a run"
    parser = add("report", help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's directory")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    from hybridflow.elastic.claim import is_claimed

    with ended_by_signals():
        from hybridflow.observability.report import write_report

    for run_dir in arguments.run_dirs:
        console.print(str(write_report(run_dir, is_over=not is_claimed(run_dir))), soft_wrap=True)
