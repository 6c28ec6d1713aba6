"""`hybridflow watch RUN_DIR ...`: the report of a run in a browser, while it trains."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event

from rich.console import Console
from rich.text import Text

from hybridflow.cli.report import current_page, distinct
from hybridflow.errors import DataError
from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Serves the report of a run, or the comparison of several, to a browser on this machine until Ctrl-C.
The page refreshes itself while a run is training. The address contains a secret: whoever has it can read the page."""
_EXAMPLES = """examples:
  hybridflow watch runs/calculator
  hybridflow watch runs/first runs/second
  hybridflow watch runs/calculator --port 8123      from another machine: ssh -L 8123:127.0.0.1:8123 HOST
"""


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `watch` to the commands."""
    summary = "serve the report of a run while it trains"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's directory")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the port (default: any free one)")


def _run(arguments: argparse.Namespace, console: Console) -> None:
    with ended_by_signals():
        from hybridflow.observability.report.record import read_record
        from hybridflow.observability.report.server import ReportServer

    run_dirs = distinct(arguments.run_dirs)
    for run_dir in run_dirs:
        if not run_dir.is_dir():
            raise DataError(f"There is no directory '{run_dir}'.", remedy="Give the directory of a run.")
        if any(run_dir.glob("*/metrics.jsonl")):
            read_record(run_dir)  # raises an error that names the runs in it
    with closing(ReportServer(WatchedPage(run_dirs), port=arguments.port)) as server:
        console.print(Text.assemble(("watching", "bold"), f"  {server.url}  (Ctrl-C ends it)"), soft_wrap=True)
        Event().wait()


class WatchedPage:
    """The page of some runs, which is made again only if their files have changed, or one was started or has ended.

    page = WatchedPage([Path("runs/calculator")])
    page()
    """

    def __init__(self, run_dirs: Sequence[Path]) -> None:
        self._run_dirs = run_dirs
        self._made: tuple[object, str] | None = None

    def __call__(self) -> str:
        from hybridflow.elastic.claim import is_claimed
        from hybridflow.observability.report.record import stamps

        state = [(is_claimed(run_dir), stamps(run_dir)) for run_dir in self._run_dirs]
        made = self._made
        if made is None or made[0] != state:
            made = self._made = (state, _page(self._run_dirs))
        return made[1]


def _page(run_dirs: Sequence[Path]) -> str:
    from hybridflow.observability.printable import shown
    from hybridflow.observability.report.document import html_page

    try:
        return current_page(run_dirs, is_renewed=True)
    except DataError as error:  # a run that has just been started
        said = f'<header><p class="eyebrow">Run report</p><h1>Waiting</h1><p class="lead">{shown(error.message)}</p>'
        return html_page("Waiting", f"{said}</header>", is_renewed=True)
