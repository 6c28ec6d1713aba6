"""The results of step.py as a table and as JSON: medians, ratios to TRL, the cost of Ray."""

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from record import write_record
from systems import Case, Effort, Measured
from workload import NUM_PROMPTS, RESPONSE_TOKENS, SAMPLES_PER_PROMPT

WARM_UP_STEPS = 2
HEADER = ("model", "task", "system", "rollout", "backend", "old logprobs")
HEADER += ("median", "min", "tokens/s", "rest", "x same", "x fastest")
WIDTHS = (6, 6, 11, 13, 8, 14, 8, 8, 10, 7, 9, 11)


@dataclass(frozen=True)
class Row:
    """One case: median and smallest seconds per step, and how many times faster it is than TRL.

    `times_trl_alike` compares with TRL making the same recomputations, with the same generation where TRL has it;
    `times_trl_fastest` with TRL's fastest way of doing the algorithm. None for TRL's own rows.
    """

    case: Case
    median: float
    smallest: float
    other_seconds: float
    times_trl_alike: float | None = None
    times_trl_fastest: float | None = None


def rows_of(measured: dict[Case, list[Measured]]) -> list[Row]:
    """A row for each case that has measurements, in order; the first steps of each process do not count."""
    plain = {case: _summary(case, runs) for case, runs in measured.items() if runs}
    return [_compared(row, plain) if row.case.is_ours else row for row in plain.values()]


def table_of(rows: list[Row], effort: Effort) -> str:
    """The rows as text, a blank line between tasks, and what Ray adds below."""
    tokens = NUM_PROMPTS * SAMPLES_PER_PROMPT * RESPONSE_TOKENS
    lines = [
        f"Seconds per step, workload W, {effort.threads} threads, {os.cpu_count()} cores ({platform.machine()})",
        _line(HEADER),
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        case = row.case
        if before is None or _task(before.case) != _task(case):
            lines.append("")
        ratios = ["" if r is None else f"{r:.2f}" for r in (row.times_trl_alike, row.times_trl_fastest)]
        numbers = [f"{row.median:.3f}", f"{row.smallest:.3f}", f"{tokens / row.median:,.0f}"]
        words = [case.size, case.algorithm, case.system, case.rollout, case.backend, _old_logprobs(case)]
        lines.append(_line([*words, *numbers, f"{row.other_seconds:.1f}", *ratios]))
    return "\n".join([*lines, "", *_ray_prices(rows), ""])


def write_results(path: Path, measured: dict[Case, list[Measured]], rows: list[Row], effort: Effort) -> None:
    """Everything measured, with the machine and the versions it was measured with."""
    content = {
        "effort": asdict(effort),
        "warm_up_steps": WARM_UP_STEPS,
        "rows": [asdict(row) for row in rows],
        "runs": [{"case": asdict(case), "runs": [asdict(run) for run in runs]} for case, runs in measured.items()],
    }
    write_record(path, ["transformers", "ray"], content)


def _ray_prices(rows: list[Row]) -> list[str]:
    """The time that Ray adds to a step, for each case measured on both backends."""
    medians = {row.case: row.median for row in rows}
    lines = []
    for case, seconds in medians.items():
        local = medians.get(Case(case.system, case.algorithm, case.size, case.rollout, "local"))
        if case.backend == "ray" and local is not None:
            added = seconds - local
            task = f"{case.algorithm} {case.size} {case.rollout}"
            lines.append(f"Ray adds {1e3 * added:+.0f} ms ({added / local:+.0%}) to a step of {task}.")
    return lines


def _summary(case: Case, runs: list[Measured]) -> Row:
    counted = [seconds for run in runs for seconds in run.step_seconds[WARM_UP_STEPS:]]
    rest = statistics.median(run.other_seconds for run in runs)
    return Row(case, statistics.median(counted), min(counted), rest)


def _compared(row: Row, rows: dict[Case, Row]) -> Row:
    """The row with its ratios; TRL without vLLM (PPO) is compared by its transformers generation."""
    case = row.case
    peers = [r for r in rows.values() if not r.case.is_ours and _task(r.case) == _task(case)]
    alike = [r for r in peers if r.case.recomputes == case.recomputes]
    alike = [r for r in alike if r.case.rollout == case.rollout] or alike
    return Row(
        case,
        row.median,
        row.smallest,
        row.other_seconds,
        times_trl_alike=alike[0].median / row.median if alike else None,
        times_trl_fastest=min(r.median for r in peers) / row.median if peers else None,
    )


def _task(case: Case) -> tuple[str, str]:
    return case.algorithm, case.size


def _old_logprobs(case: Case) -> str:
    if case.recomputes:
        return "forward pass"
    return "generation's" if case.algorithm == "ppo" else "none"


def _line(cells: Sequence[str]) -> str:
    """Words to the left, numbers to the right."""
    padded = [
        cell.ljust(width) if i < 6 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    ]
    return "".join(padded).rstrip()
