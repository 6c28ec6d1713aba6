"""The results of step.py: a line of JSON per process, and a table: medians, ratios to TRL and verl, the cost of Ray."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from record import append_line, read_lines
from step_work import step_flops
from systems import SAMPLING, Case, Effort, Measured
from workload import SHAPES, Workload

from hybridflow import __version__
from hybridflow.optional import version_of

WARM_UP_STEPS = 2
HEADER = ("", "model", "task", "system", "rollout", "backend", "old logprobs")
HEADER += ("median", "min", "CPU s", "seq/s", "share", "rest", "x same", "x fastest", "x verl")
WIDTHS = (3, 14, 13, 11, 13, 8, 14, 8, 8, 8, 9, 7, 7, 8, 11, 8)
_NUM_WORDS = 7


@dataclass(frozen=True)
class Line:
    """Figures of one process: its run and round, the load of the machine before it, and what it measured."""

    run: str
    round: int
    case: Case
    effort: Effort
    measured: Measured
    load: float


@dataclass(frozen=True)
class Row:
    """The processes of one case: seconds per step, and how many times faster it is than TRL and verl.

    `share`: the rate of the step's matrix products (see `step_work.py`) over the machine's, of the same run.
    `times_trl_alike` compares with TRL making the same recomputations, with the same generation where TRL has it;
    `times_trl_fastest` with TRL's fastest way of doing the algorithm. None for the peers' own rows.
    """

    case: Case
    median: float
    smallest: float
    cpu: float
    other_seconds: float
    share: float
    times_trl_alike: float | None = None
    times_trl_fastest: float | None = None
    times_verl: float | None = None


def append(path: Path, line: Line) -> None:
    """Adds a line, with the machine and the versions."""
    versions = {name: number for name in ("torch", "transformers", "ray") if (number := version_of(name))}
    about = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {"hybridflow": __version__, **versions},
    }
    append_line(path, asdict(line) | about)


def lines_of(path: Path, run: str) -> list[Line]:
    """The lines of a run."""
    return [
        Line(
            run,
            line["round"],
            Case(**line["case"]),
            Effort(**line["effort"]),
            Measured(**line["measured"]),
            line["load"],
        )
        for line in read_lines(path)
        if line["run"] == run
    ]


def finished(path: Path, run: str) -> set[tuple[int, Case]]:
    """The rounds and cases that have a line."""
    return {(line.round, line.case) for line in lines_of(path, run)}


def rows_of(lines: list[Line], workload: Workload) -> list[Row]:
    """A row for each case that has lines, in order; the first steps of each process do not count."""
    grouped: dict[Case, list[Measured]] = {}
    for line in lines:
        grouped.setdefault(line.case, []).append(line.measured)
    plain = {case: _summary(case, runs, workload) for case, runs in grouped.items()}
    rows = [_compared(row, plain) if row.case.is_ours else row for row in plain.values()]
    order = list(dict.fromkeys(row.case.task for row in rows))
    return sorted(rows, key=lambda row: order.index(row.case.task))


def table_of(rows: list[Row], effort: Effort) -> str:
    """The rows as text, a blank line between tasks, and what Ray adds below."""
    lines = [
        f"Seconds per step, {effort.threads} threads, {os.cpu_count()} cores ({platform.machine()})",
        _line(HEADER),
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        case = row.case
        if before is None or before.case.task != case.task:
            lines.append("")
        model = case.size if case.dtype == "float32" else f"{case.size} {case.dtype}"
        words = [case.workload, model, case.algorithm, case.system, case.rollout, case.backend, _old_logprobs(case)]
        numbers = [f"{row.median:.3f}", f"{row.smallest:.3f}", f"{row.cpu:.2f}"]
        numbers += [f"{sequences(case) / row.median:,.1f}", f"{row.share:.0%}", f"{row.other_seconds:.1f}"]
        ratios = ["" if r is None else f"{r:.2f}" for r in (row.times_trl_alike, row.times_trl_fastest, row.times_verl)]
        lines.append(_line([*words, *numbers, *ratios]))
    return "\n".join([*lines, "", *_ray_prices(rows), ""])


def sequences(case: Case) -> int:
    """Sequences of a step."""
    shape = SHAPES[case.workload]
    return shape.prompts if case.algorithm == "sft" else shape.sequences


def _ray_prices(rows: list[Row]) -> list[str]:
    """The time that Ray adds to a step, for each case measured on both backends."""
    medians = {row.case: row.median for row in rows}
    lines = []
    for case, seconds in medians.items():
        local = medians.get(replace(case, backend="local"))
        if case.backend == "ray" and local is not None:
            added = seconds - local
            task = f"{case.workload} {case.algorithm} {case.size} {case.rollout}"
            lines.append(f"Ray adds {1e3 * added:+.0f} ms ({added / local:+.0%}) to a step of {task}.")
    return lines


def _summary(case: Case, runs: list[Measured], workload: Workload) -> Row:
    counted = [seconds for run in runs for seconds in run.step_seconds[WARM_UP_STEPS:]]
    cpu = statistics.median(seconds for run in runs for seconds in run.cpu_seconds[WARM_UP_STEPS:])
    rest = statistics.median(run.other_seconds for run in runs)
    rate = statistics.median(run.matrix_rate for run in runs)
    flops = step_flops(workload, *case.task[:2], case.size, recomputes=case.recomputes)
    median = statistics.median(counted)
    return Row(case, median, min(counted), cpu, rest, flops / median / rate)


def _compared(row: Row, rows: dict[Case, Row]) -> Row:
    """The row with its ratios; TRL without vLLM (PPO) is compared by its transformers generation."""
    case = row.case
    trl, verl = (
        [r for r in rows.values() if r.case.system == system and r.case.task == case.task] for system in ("trl", "verl")
    )
    alike = [r for r in trl if r.case.recomputes == case.recomputes]
    alike = [r for r in alike if r.case.rollout == case.rollout] or alike
    return replace(
        row,
        times_trl_alike=alike[0].median / row.median if alike else None,
        times_trl_fastest=min(r.median for r in trl) / row.median if trl else None,
        times_verl=verl[0].median / row.median if verl else None,
    )


def _old_logprobs(case: Case) -> str:
    if case.algorithm not in SAMPLING:
        return "-"
    if case.recomputes:
        return "forward pass"
    return "generation's" if case.algorithm == "ppo" else "none"


def _line(cells: Sequence[str]) -> str:
    """Words to the left, numbers to the right."""
    padded = [
        cell.ljust(width) if i < _NUM_WORDS else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return "".join(padded).rstrip()
