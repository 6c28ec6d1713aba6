"""`--multirun`: a sweep, one run per combination of values, all checked first, and a table of their results."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from hybridflow.config.derived import run_dir
from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.checked import checked_composition
from hybridflow.launch.compose.command_line import CommandLine, parse_command_line
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.sweep import Combination, combinations, quoted
from hybridflow.launch.compose.trainers import PURPOSES, known_command, shown_name
from hybridflow.launch.dry_run import examine
from hybridflow.launch.messages import from_here, say_problems, say_warnings
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.run_directory import CONFIG_FILE
from hybridflow.launch.signals import on_signals
from hybridflow.launch.sweep_results import DONE, FAILED, INTERRUPTED, Results, SweptRun
from hybridflow.observability.formatting import counted
from hybridflow.observability.logs import configure_logging
from hybridflow.process import status_after

_RUN_DIR, _URL = "trainer.run_dir", "trainer.checkpoint_url"


Execute = Callable[[Sequence[SweptRun], Results, Console], int | None]
"""Executes the runs of a sweep that are not done; returns the number of the signal that stopped the sweep."""

DeviceOf = Callable[[Composed], str | None]
"""The device on which a run will be executed; None if the plan of the run finds it on this machine."""


def run_sweep(
    flags: CommandLine, console: Console, execute: Execute, device_of: DeviceOf = lambda composed: None
) -> int:
    """Checks all runs of a sweep, then executes those that are not done; returns the exit status of the command.

    0 if all are done, 1 if one failed (the others are run), 2 if a run cannot begin (none is), that of `status_after`
    if a signal stopped the sweep.
    """
    problems = Problems(collects=True)
    runs = _checked(_planned(flags, problems), problems, console, device_of)
    is_sound = not problems.found
    if flags.dry_run or not is_sound:
        for run in runs if is_sound else []:
            console.print(Text(f"  {run.name}  {from_here(run.run_dir)}"), soft_wrap=True)
        found = f"{counted(len(runs), 'run')}, no errors found"
        verdict = found if is_sound else counted(len(problems.found), "problem")
        console.print(Text(f"{verdict}; nothing was started", "bold green" if is_sound else "bold red"))
        return 0 if is_sound else 2
    results = Results(runs)
    stopped = execute(runs, results, console)
    sys.stdout.write("\n".join(results.table_lines()) + "\n")
    sys.stdout.flush()
    console.print(f"  results     {from_here(results.file)}", soft_wrap=True)
    if stopped is not None:
        return status_after(stopped)
    return 1 if results.left else 0


def one_after_another(runs: Sequence[SweptRun], results: Results, console: Console) -> int | None:
    """Executes the runs on this machine, each in a process of its own."""
    for place, run in enumerate(runs):
        is_done = place not in results.left
        head = (f"run {place + 1} of {len(runs)}", "bold")
        console.print(Text.assemble(head, f"  {run.name}{'  is done' if is_done else ''}"), soft_wrap=True)
        if not is_done and (stopped := _execute(place, run, results)) is not None:
            return stopped
    return None


def _execute(place: int, run: SweptRun, results: Results) -> int | None:
    """Executes a run and records its results; returns the signal that stopped it.

    A signal is passed on, and the run ends on its own. From a terminal, the run has received it as well, and takes two
    within a second as one.
    """
    started, received = time.monotonic(), []
    process = subprocess.Popen([sys.executable, "-m", "hybridflow", *run.words])

    def forward(number: int) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    with on_signals(forward):
        status = process.wait()
    how = DONE if status == 0 else INTERRUPTED if received else FAILED
    results.record(place, how, time.monotonic() - started)
    return received[0] if received else None


def _planned(flags: CommandLine, problems: Problems) -> list[SweptRun]:
    """The runs of a sweep, each in a directory of its own below `trainer.run_dir`, or `runs/<experiment>-sweep`, and at
    a URL of its own below `trainer.checkpoint_url`."""
    found = combinations(flags.overrides, problems, config_dir=flags.config_dir)
    with problems.caught():
        if any(_RUN_DIR in combination.values for combination in found):
            raise ConfigError(
                f"{_RUN_DIR} has several values.", remedy="Give one: each run gets a directory of its own below it."
            )
    if not found or problems.found:
        return []
    is_named = any(text.partition("=")[0] == _RUN_DIR for text in flags.overrides)
    unread, named = Problems(collects=True), {"config_name": flags.config_name, "config_dir": flags.config_dir}
    first = compose_run(replace(flags, overrides=list(found[0].settings)).typed(unread), **named, problems=unread)
    directory = Path("runs", f"{first.config.trainer.experiment}-sweep").absolute()
    if is_named or first.config.trainer.run_dir:
        directory = run_dir(first.config)
    with problems.caught():
        if (directory / CONFIG_FILE).exists():
            raise ConfigError(
                f"{_RUN_DIR}={directory} holds a single run.",
                remedy=f"Use another directory, such as {directory}-sweep.",
            )
    url = first.config.trainer.checkpoint_url
    return [_planned_run(flags, combination, directory / combination.name, url) for combination in found]


def _planned_run(flags: CommandLine, combination: Combination, directory: Path, url: str | None) -> SweptRun:
    is_ours = flags.config_name in PURPOSES and flags.config_dir is None
    words = [shown_name(flags.config_name) if is_ours else "ppo", *map(str, flags.files)]
    words += [text for text in combination.settings if text.partition("=")[0] not in (_RUN_DIR, _URL)]
    words.append(f"{_RUN_DIR}={quoted(str(directory))}")
    words += [] if url is None else [f"{_URL}={quoted('/'.join((url.rstrip('/'), combination.name)))}"]
    if not is_ours:
        words += ["--config-name", flags.config_name]
        words += [] if flags.config_dir is None else ["--config-dir", str(flags.config_dir)]
    return SweptRun(combination, directory, tuple(words))


def _checked(runs: Sequence[SweptRun], problems: Problems, console: Console, device_of: DeviceOf) -> list[SweptRun]:
    """The runs with their plans, checked as `--dry-run` does; prints each problem once, with the runs that have it."""
    configure_logging(None, logging.ERROR)
    where: dict[str, list[str]] = {}
    checked: list[SweptRun] = []
    for run in runs:
        own = Problems(collects=True)
        with own.caught():
            checked.append(replace(run, plan=_plan(run, own, device_of)))
        for problem in own.found:
            where.setdefault(problem.message, []).append(run.name)
        problems.add(*own.found, *own.warnings)
    for place, problem in enumerate(problems.found):
        say_problems(console, problems.found[: place + 1], begin=place)
        names = where.get(problem.message, [])
        if names and len(names) < len(runs):
            console.print(Text(f"In {len(names)} of {len(runs)} runs: {_described(names, runs)}"), soft_wrap=True)
    say_warnings(console, problems.warnings)
    return checked


def _described(names: Sequence[str], runs: Sequence[SweptRun]) -> str:
    """The value that only these runs have, or else their names."""
    for key in runs[0].combination.values:
        by_value: dict[str, list[str]] = {}
        for run in runs:
            by_value.setdefault(f"{key}={run.combination.values[key]}", []).append(run.name)
        if found := [value for value, those in by_value.items() if those == list(names)]:
            return f"those with {found[0]}"
    return "; ".join(names)


def _plan(run: SweptRun, problems: Problems, device_of: DeviceOf) -> RunPlan | None:
    """The plan of a run without problems."""
    command, *words = run.words
    flags = parse_command_line(words, program=f"hybridflow {command}", command=known_command(command))
    named = {"config_name": flags.config_name, "config_dir": flags.config_dir}
    composed, has_layout = checked_composition(flags.typed(problems), **named, problems=problems)
    if not has_layout or problems.found:
        return None
    return examine(composed, problems, has_layout=has_layout, device=device_of(composed)).plan
