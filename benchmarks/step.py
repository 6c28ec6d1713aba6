"""Seconds per step of GRPO, PPO, DPO, SFT and reward training: ours, compared with TRL's trainers and verl's.

    python benchmarks/step.py [--workloads W P H G] [--sizes tiny ten smol] [--algorithms grpo ...] [--rounds 2] ...

Every case is a process of its own. A round runs each case once, so that ours and the peers alternate and share
whatever else the machine does. The first two steps of a process do not count. The machine's matrix rate is measured
before each process. Appends one line per process to benchmarks/results/step.jsonl and skips those that have a line
under the same --run, so it can be stopped at any time and then continues; ends with a table of all lines of the run.
"""

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from step_table import Line, append, finished, lines_of, rows_of, table_of
from systems import Case, Effort, RunFailed, cases, measure
from workload import SHAPES, SIZES, Workload, build_workload

logger = logging.getLogger("step")

RESULTS = Path(__file__).parent / "results" / "step.jsonl"
CACHE = Path.home() / ".cache" / "hybridflow" / "workloads"
SYSTEMS = ("hybridflow", "trl", "verl")
ALGORITHMS = tuple(dict.fromkeys(name for shape in SHAPES.values() for name in shape.algorithms))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what has no line yet, and shows all; returns 1 when a case failed."""
    options = parsed(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    chosen = cases(options.workloads, options.sizes, options.algorithms, options.rollouts, options.backends)
    chosen = [case for case in chosen if case.system in options.systems and (case.is_default or not options.defaults)]
    effort = Effort(options.steps, options.threads, options.timeout)
    workload = build_workload(options.cache)
    deadline = time.monotonic() + 60 * options.minutes
    done = finished(options.results, options.run)
    num_failed = 0
    for number in range(1, options.rounds + 1):
        for case in chosen:
            if (number, case) not in done and time.monotonic() < deadline:
                line = measured_line(options.run, number, case, workload, effort)
                num_failed += line is None
                if line is not None:
                    append(options.results, line)
    sys.stdout.write(table_of(rows_of(lines_of(options.results, options.run), workload), effort))
    return int(num_failed > 0)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--rollouts", nargs="+", choices=("transformers", "vllm"), default=["transformers", "vllm"])
    parser.add_argument("--backends", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--defaults", action="store_true", help="only what is each system's default: no recomputed old logprobs"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each system")
    parser.add_argument("--steps", type=int, default=8, help="steps of a process, the first two not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no process after so many minutes")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds after which a process is given up")
    parser.add_argument("--run", default=f"{datetime.now():%Y-%m-%d}", help="name under which lines are compared")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the workloads' models and rows are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def measured_line(run: str, number: int, case: Case, workload: Workload, effort: Effort) -> Line | None:
    """Runs a case once; one that failed is reported, and has no line."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            measured = measure(case, workload, effort, Path(scratch))
        except RunFailed as failure:
            logger.error("round %d  %s  FAILED\n%s", number, case.title, failure)
            return None
    steps = " ".join(f"{seconds:.3f}" for seconds in measured.step_seconds)
    logger.info("round %d  %s  load=%.1f  steps: %s", number, case.title, load, steps)
    return Line(run, number, case, effort, measured, load)


if __name__ == "__main__":
    raise SystemExit(main())
