"""`hybridflow report RUN_DIR ...`: the report of a run at any time, and a comparison of several."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from hybridflow.errors import ConfigError
from hybridflow.launch.command import ended_by_signals

_DESCRIPTION = """Writes report.html into the directory of a run, from what it has logged so far: curves, time per
stage, samples, and how the run ended. With several directories it also writes one page that compares the runs:
evaluations, settings that differ, overlaid curves, and samples of the same prompts. A run writes its own report from
the first step on; hybridflow watch serves both pages while runs are training."""
_EXAMPLES = """examples:
  hybridflow report runs/calculator                 also while it runs, or after it was killed
  hybridflow report runs/first runs/second          one page in each directory, and comparison.html
  hybridflow report runs/* -o all.html
  hybridflow report runs/first runs/second --follow  write the comparison again until both have ended
"""
_COMPARISON = Path("comparison.html")
_SECONDS_APART = 5.0


def add_command(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds `report` to the commands."""
    summary = "write the report of a run, or a comparison of several"
    parser = add(help=summary, description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.set_defaults(run=_run)
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's directory")
    output = f"the file to write (default: RUN_DIR/report.html; for several runs, {_COMPARISON})"
    follow = "write the page again every 5 seconds, and let it refresh itself, until all runs have ended"
    parser.add_argument("--follow", action="store_true", help=follow)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=output)


def current_page(run_dirs: Sequence[Path], *, is_renewed: bool) -> str:
    """The report of one run, or the comparison of several; if `is_renewed`, it refreshes itself while one trains."""
    from hybridflow.elastic.claim import is_claimed

    with ended_by_signals():
        from hybridflow.observability.report.comparison import comparison_page, run_names
        from hybridflow.observability.report.page import current_record, report_page

    records = [current_record(run_dir, is_over=not is_claimed(run_dir)) for run_dir in run_dirs]
    is_renewed = is_renewed and any(record.ending is None for record in records)
    if len(records) == 1:
        return report_page(records[0], is_renewed=is_renewed)
    return comparison_page(dict(zip(run_names(run_dirs), records, strict=True)), is_renewed=is_renewed)


def distinct(run_dirs: Sequence[Path]) -> list[Path]:
    """The directories, each once."""
    return list({run_dir.resolve(): run_dir for run_dir in run_dirs}.values())


def _run(arguments: argparse.Namespace, console: Console) -> None:
    from hybridflow.elastic.claim import is_claimed

    with ended_by_signals():
        from hybridflow.observability.report import write_report
        from hybridflow.observability.whole_files import replace_file

    run_dirs, output = distinct(arguments.run_dirs), arguments.output
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise ConfigError(f"--output={output} cannot be written.", remedy="Give a file in an existing directory.")
    if len(run_dirs) == 1 and output is not None:
        written = [replace_file(output, current_page(run_dirs, is_renewed=False))]
    else:
        written = [write_report(run_dir, is_over=not is_claimed(run_dir)) for run_dir in run_dirs]
        if len(run_dirs) > 1:
            written.append(replace_file(output or _COMPARISON, current_page(run_dirs, is_renewed=False)))
    for path in written:
        console.print(str(path), soft_wrap=True)
    if arguments.follow:
        _follow(run_dirs, output or (_COMPARISON if len(run_dirs) > 1 else run_dirs[0] / "report.html"))


def _follow(run_dirs: Sequence[Path], path: Path) -> None:
    """Writes the page again and again, which refreshes itself meanwhile, until all runs have ended."""
    from hybridflow.elastic.claim import is_claimed
    from hybridflow.observability.whole_files import replace_file

    is_on = True
    while is_on:
        is_on = any(is_claimed(run_dir) for run_dir in run_dirs)
        replace_file(path, current_page(run_dirs, is_renewed=is_on))
        if is_on:
            time.sleep(_SECONDS_APART)
