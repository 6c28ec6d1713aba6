"""The cost of calls, steps and checkpoints for the driver, for 8 to 1,024 ranks and 1,024 to 1,048,576 rows.

    python benchmarks/scale.py [--ranks 8 64 256 1024] [--rows 1024 8192 131072 1048576] [--layouts data tensor]

The driver runs the training loop of PPO with all of its records; the workers are stand-ins that answer at once, many in
one process, with a message per rank and call (`scale_workers.py`). Ranks vary at 131,072 rows, and rows at 1,024 ranks
(the largest number given). Every case is a process of its own. Seconds are those of the driver's processors. A growth
of 1.0 is linear. Prints a table and writes all numbers to benchmarks/results/scale-<date>.json.
"""

import argparse
import logging
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from record import run_reporting, write_record

logger = logging.getLogger("scale")

HERE = Path(__file__).parent
ROWS, MOST_ROWS = 131_072, 1_048_576
COLUMNS = ("empty", "draw", "generate", "score", "values", "advantages", "update", "step", "checkpoint")
LIMITS = {"step": 1.0, **dict.fromkeys(COLUMNS[:7], 0.05)}
"""Seconds at 1,024 ranks and 131,072 rows that should not be exceeded."""

PROMPTS_PER_ROW = 0.25
"""One prompt per four rows; a part of a batch has at least one prompt."""


@dataclass(frozen=True)
class Case:
    """A layout (`data`: data parallelism alone; `tensor`: with 8 tensor-parallel ranks), and the size of the run."""

    layout: str
    ranks: int
    rows: int

    @property
    def is_possible(self) -> bool:
        """Whether every data-parallel rank and every replica gets a prompt."""
        parts = self.ranks if self.layout == "data" else self.ranks // 4
        return self.rows * PROMPTS_PER_ROW >= parts


Report = dict[str, dict[str, dict[str, float]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 8192, ROWS, MOST_ROWS])
    parser.add_argument("--layouts", nargs="+", choices=("data", "tensor"), default=["data", "tensor"])
    parser.add_argument(
        "--repeats", type=int, default=3, help="measurements of each call, after one that does not count"
    )
    parser.add_argument("--steps", type=int, default=0, help="further steps of the first case, for its memory")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a process is given up")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    path = options.results / f"scale-{datetime.now():%Y-%m-%d-%H%M}.json"
    found: dict[Case, Report] = {}
    chosen = list(cases(options.layouts, options.ranks, options.rows))
    for number, case in enumerate(chosen):
        load = os.getloadavg()[0]
        command = [sys.executable, str(HERE / "scale_round.py"), "--layout", case.layout, "--ranks", str(case.ranks)]
        command += ["--rows", str(case.rows), "--repeats", str(options.repeats)]
        command += ["--steps", str(0 if number else options.steps)]
        report = run_reporting(command, options.timeout)
        if report is not None:
            found[case] = report
            logger.info("%s  load=%.1f  step %.2f s", case, load, report["costs"]["step"]["seconds"])
            write_record(path, [], {"cases": [vars(case) | report for case, report in found.items()]})
    sys.stdout.write(shown(found))
    logger.info("written %s", path)
    return int(len(found) < len(chosen))


def cases(layouts: Sequence[str], ranks: Sequence[int], rows: Sequence[int]) -> Iterator[Case]:
    """For each layout, all ranks at `ROWS` rows (or the most given), then all rows at the most ranks."""
    fixed = ROWS if ROWS in rows else max(rows)
    for layout in layouts:
        wanted = [Case(layout, count, fixed) for count in ranks]
        wanted += [Case(layout, max(ranks), count) for count in rows]
        yield from (case for case in dict.fromkeys(wanted) if case.is_possible)


def shown(found: dict[Case, Report]) -> str:
    """Seconds and bytes of each case, and how they grow with ranks and with rows."""
    lines = [
        f"Driver, {os.cpu_count()} cores ({platform.machine()}): milliseconds of its processors, and MB of messages"
    ]
    for title, measure, scale in (("milliseconds", "seconds", 1e3), ("MB", "bytes", 1e-6)):
        lines += ["", line((title, "ranks", "rows", *COLUMNS))]
        for layout in dict.fromkeys(case.layout for case in found):
            own = {case: report["costs"] for case, report in found.items() if case.layout == layout}
            numbers = {case: [costs[name][measure] for name in COLUMNS] for case, costs in own.items()}
            for case, values in numbers.items():
                cells = [f"{scale * value:,.{1 if scale * value < 100 else 0}f}" for value in values]
                lines.append(line((layout, f"{case.ranks:,}", f"{case.rows:,}", *cells)))
            rows = statistics.mode(case.rows for case in own)
            ranks = max(case.ranks for case in own)
            by_ranks = {case: values for case, values in numbers.items() if case.rows == rows}
            by_rows = {case: values for case, values in numbers.items() if case.ranks == ranks}
            lines.append(line(("", "growth", "", *growth(by_ranks, lambda case: case.ranks))))
            lines.append(line(("", "", "growth", *growth(by_rows, lambda case: case.rows))))
    return "\n".join([*lines, "", *verdicts(found), ""])


def growth(numbers: dict[Case, list[float]], size: Callable[[Case], int]) -> list[str]:
    """For each column the exponent p of cost ~ size^p, fitted to the upper half of the sizes, at least two of them.

    Below, what does not depend on the size hides how a cost grows.
    """
    sizes = sorted({size(case) for case in numbers})
    upper = set(sizes[-max(2, (len(sizes) + 1) // 2) :])
    chosen = [(math.log(size(case)), values) for case, values in numbers.items() if size(case) in upper]
    if len(chosen) < 2:
        return [""] * len(COLUMNS)
    logs = [log for log, _ in chosen]
    columns = zip(*(values for _, values in chosen), strict=True)
    return [
        f"{statistics.linear_regression(logs, [math.log(max(value, 1e-9)) for value in column]).slope:.2f}"
        for column in columns
    ]


def verdicts(found: dict[Case, Report]) -> Iterator[str]:
    """The goals at 1,024 ranks and 131,072 rows, and whether they are met."""
    for case, report in found.items():
        if (case.ranks, case.rows) == (1024, ROWS):
            for name, limit in LIMITS.items():
                seconds = report["costs"][name]["seconds"]
                verdict = "met" if seconds <= limit else "NOT met"
                yield f"{case.layout:<8}{name:<12}{seconds:.3f} s of the driver's processors; goal {limit} s: {verdict}"


def line(cells: Sequence[str]) -> str:
    """One line of a table."""
    return cells[0].ljust(14) + "".join(cell.rjust(12) for cell in cells[1:])


if __name__ == "__main__":
    raise SystemExit(main())
