"""`--multirun`: a sweep, one run per combination of values, one after another, and a table of their results."""

import csv
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from hybridflow.config.derived import run_dir
from hybridflow.errors import ConfigError, Faults, HybridflowError
from hybridflow.launch.checked import checked_composition
from hybridflow.launch.compose.command_line import CommandLine, parse_command_line
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.sweep import Combination, combinations, quoted, short_keys
from hybridflow.launch.compose.trainers import PURPOSES, known_command, shown_name
from hybridflow.launch.dry_run import examine
from hybridflow.launch.messages import from_here, say_problems, say_warnings
from hybridflow.launch.run_directory import CONFIG_FILE
from hybridflow.observability import formatting
from hybridflow.observability.jsonlines import read_rows
from hybridflow.observability.logs import configure_logging
from hybridflow.observability.progress import eval_label
from hybridflow.observability.trackers.jsonl import METRICS_FILE

RESULTS_FILE = "results.csv"

_RUN_DIR = "trainer.run_dir"
_SCORES = ("critic/score/mean", "train/loss")
_DONE, _FAILED, _INTERRUPTED, _NOT_STARTED = "done", "failed", "interrupted", "not started"
_LAST = ("score", "loss", "seconds", "directory", "settings")
"""The columns that come last, in this order."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Row = dict[str, str]
"""A line of the table: its settings, status, evaluation, score, seconds, directory and all settings as typed."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: its combination, its directory, and the words of its command."""

    combination: Combination
    run_dir: Path
    words: tuple[str, ...]

    @property
    def settings(self) -> str:
        """The words as a shell takes them; a run that is done is done again only if they change."""
        return shlex.join(self.words)


def run_sweep(flags: CommandLine, console: Console) -> int:
    """Checks all runs of a sweep, then executes those that are not done; returns the exit status of the command.

    0 if all are done, 1 if one failed (the others are run), 2 if a run cannot begin (none is), 128 + the number of the
    signal that stopped the sweep.
    """
    faults = Faults(collects=True)
    runs = _planned(flags, faults)
    is_sound = _check(runs, faults, console)
    if flags.dry_run or not is_sound:
        for run in runs if is_sound else []:
            console.print(Text(f"  {run.combination.name}  {from_here(run.run_dir)}"), soft_wrap=True)
        verdict = f"{len(runs)} runs, no errors found" if is_sound else f"{len(faults.found)} problems"
        console.print(Text(f"{verdict}; nothing was started", "bold green" if is_sound else "bold red"))
        return 0 if is_sound else 2
    return _execute(runs, console)


def _execute(runs: Sequence[SweptRun], console: Console) -> int:
    """Executes the runs that are not done, and prints the table, also when a signal stops the sweep."""
    directory = runs[0].run_dir.parent
    directory.mkdir(parents=True, exist_ok=True)
    file, stopped = directory / RESULTS_FILE, None
    done = {row["settings"]: row for row in _read(file) if row["status"] == _DONE}
    rows = [done.get(run.settings) or _row(run, _NOT_STARTED) for run in runs]
    for place, run in enumerate(runs):
        is_done = rows[place]["status"] == _DONE
        head = (f"run {place + 1} of {len(runs)}", "bold")
        console.print(Text.assemble(head, f"  {run.combination.name}{'  is done' if is_done else ''}"), soft_wrap=True)
        if not is_done:
            rows[place], stopped = _executed(run)
            _write(file, rows)
        if stopped is not None:
            break
    _write(file, rows)
    sys.stdout.write("\n".join(table_lines(rows)) + "\n")
    sys.stdout.flush()
    console.print(f"  results     {from_here(file)}", soft_wrap=True)
    if stopped is not None:
        return 128 + stopped
    return 0 if all(row["status"] == _DONE for row in rows) else 1


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The results as aligned columns, without the settings that all runs share."""
    shown = [name for name in _columns(rows) if name != "settings"]
    return formatting.columns(
        [[*map(eval_label, shown)], *([_cell(row.get(name, "")) for name in shown] for row in rows)]
    )


def _planned(flags: CommandLine, faults: Faults) -> list[SweptRun]:
    """The runs of a sweep, each in a directory of its own below `trainer.run_dir`, or `runs/<experiment>-sweep`."""
    found = combinations(flags.overrides, faults, config_dir=flags.config_dir)
    with faults.caught():
        if any(_RUN_DIR in combination.values for combination in found):
            raise ConfigError(
                f"{_RUN_DIR} has several values.", remedy="Give one: each run gets a directory of its own below it."
            )
    if not found or faults.found:
        return []
    is_named = any(text.partition("=")[0] == _RUN_DIR for text in flags.overrides)
    first = _composed(replace(flags, overrides=list(found[0].settings)), Faults(collects=True))
    directory = Path("runs", f"{first.config.trainer.experiment}-sweep").absolute()
    if is_named or first.config.trainer.run_dir:
        directory = run_dir(first.config)
    with faults.caught():
        if (directory / CONFIG_FILE).exists():
            raise ConfigError(
                f"{_RUN_DIR}={directory} holds a single run.",
                remedy=f"Use another directory, such as {directory}-sweep.",
            )
    return [_planned_run(flags, combination, directory / combination.name) for combination in found]


def _planned_run(flags: CommandLine, combination: Combination, directory: Path) -> SweptRun:
    is_ours = flags.config_name in PURPOSES and flags.config_dir is None
    words = [shown_name(flags.config_name) if is_ours else "ppo", *map(str, flags.files)]
    words += [text for text in combination.settings if text.partition("=")[0] != _RUN_DIR]
    words.append(f"{_RUN_DIR}={quoted(str(directory))}")
    if not is_ours:
        words += ["--config-name", flags.config_name]
        words += [] if flags.config_dir is None else ["--config-dir", str(flags.config_dir)]
    return SweptRun(combination, directory, tuple(words))


def _check(runs: Sequence[SweptRun], faults: Faults, console: Console) -> bool:
    """Checks every run as `--dry-run` does, and prints each problem once, with the runs that have it."""
    configure_logging(None, logging.ERROR)
    where: dict[str, list[str]] = {}
    for run in runs:
        own = Faults(collects=True)
        with own.caught():
            _examine(run, own)
        for problem in own.found:
            where.setdefault(problem.message, []).append(run.combination.name)
        faults.add(*own.found, *own.warnings)
    for place, problem in enumerate(faults.found):
        say_problems(console, faults.found[: place + 1], begin=place)
        names = where.get(problem.message, [])
        if names and len(names) < len(runs):
            console.print(Text(f"In {len(names)} of {len(runs)} runs: {_described(names, runs)}"), soft_wrap=True)
    say_warnings(console, faults.warnings)
    return not faults.found


def _described(names: Sequence[str], runs: Sequence[SweptRun]) -> str:
    """The value that only these runs have, or else their names."""
    for key in runs[0].combination.values:
        by_value: dict[str, list[str]] = {}
        for run in runs:
            by_value.setdefault(f"{key}={run.combination.values[key]}", []).append(run.combination.name)
        if found := [value for value, those in by_value.items() if those == list(names)]:
            return f"those with {found[0]}"
    return "; ".join(names)


def _examine(run: SweptRun, faults: Faults) -> None:
    command, *words = run.words
    flags = parse_command_line(words, program=f"hybridflow {command}", command=known_command(command))
    named = {"config_name": flags.config_name, "config_dir": flags.config_dir}
    composed, has_layout = checked_composition(flags.typed(faults), **named, faults=faults)
    if has_layout and not faults.found:
        examine(composed, faults, has_layout=has_layout)


def _composed(flags: CommandLine, faults: Faults) -> Composed:
    typed = flags.typed(faults)
    return compose_run(typed, config_name=flags.config_name, config_dir=flags.config_dir, faults=faults)


def _executed(run: SweptRun) -> tuple[Row, int | None]:
    """Executes a run in a process of its own; returns its results, and the signal that stopped the sweep."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "hybridflow", *run.words])
    with _forwarded_to(process) as received:
        status = process.wait()
    how = _DONE if status == 0 else _FAILED
    if received:
        how = _INTERRUPTED if status else _DONE
    return _row(run, how, time.monotonic() - started), received[0] if received else None


@contextmanager
def _forwarded_to(process: subprocess.Popen) -> Iterator[list[int]]:
    """Passes signals on to a process, which ends on its own; yields the list of their numbers.

    From a terminal, the process has received them as well, and takes two within a second as one.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    numbers = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {n: signal.signal(n, forward) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _row(run: SweptRun, status: str, seconds: float | None = None) -> Row:
    names = short_keys(list(run.combination.values))
    row = {names[key]: value for key, value in run.combination.values.items()} | {"status": status}
    metrics = _last_metrics(run.run_dir) if seconds is not None else {}
    row |= {name: str(value) for name, value in metrics.items() if name.startswith("val-core/")}
    score = next((name for name in _SCORES if name in metrics), None)
    row |= {} if score is None else {"score" if "score" in score else "loss": str(metrics[score])}
    row |= {} if seconds is None else {"seconds": f"{seconds:.1f}"}
    return row | {"directory": str(from_here(run.run_dir)), "settings": run.settings}


def _last_metrics(directory: Path) -> Mapping[str, float]:
    """The last value of each metric; empty for a run that has logged nothing."""
    found: dict[str, float] = {}
    with suppress(OSError, HybridflowError):
        for _, row in read_rows(directory / METRICS_FILE):
            found |= {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
    return found


def _columns(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return sorted(names, key=lambda name: _LAST.index(name) if name in _LAST else -1)


def _cell(text: str) -> str:
    try:
        return formatting.short(float(text)) if "." in text or "e" in text else text
    except ValueError:
        return text


def _read(file: Path) -> list[Row]:
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(lines)]


def _write(file: Path, rows: Sequence[Row]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, _columns(rows))
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(file)
