"""Seconds per GRPO and PPO step of workload W: ours, both rollouts and both backends, compared with TRL's trainers.

    python benchmarks/step.py [--sizes tiny ten] [--algorithms grpo ppo] [--rounds 2] [--steps 8] ...

Every case is a process of its own. A round runs each case once, so that ours and the peers alternate and share
whatever else the machine does. The first two steps of a process do not count. The table goes to the terminal, all
numbers to benchmarks/results/step-<date>.json.
"""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from step_table import rows_of, table_of, write_results
from systems import Case, Effort, Measured, RunFailed, cases, measure
from workload import SIZES, Workload, build_workload

logger = logging.getLogger("step")

RESULTS = Path(__file__).parent / "results"
CACHE = Path.home() / ".cache" / "hybridflow" / "workload"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, shows and writes; returns 1 when a case failed."""
    options = parsed(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    chosen = cases(options.sizes, options.algorithms, options.rollouts, options.backends)
    chosen = [case for case in chosen if case.system in options.systems]
    effort = Effort(options.steps, options.threads, options.timeout)
    workload = build_workload(options.cache)
    measured: dict[Case, list[Measured]] = {case: [] for case in chosen}
    path = options.results / f"step-{datetime.now():%Y-%m-%d-%H%M}.json"
    for number in range(1, options.rounds + 1):
        measure_round(number, measured, workload, effort)
        write_results(path, measured, rows_of(measured), effort)
    sys.stdout.write(table_of(rows_of(measured), effort))
    logger.info("written %s", path)
    return int(any(not runs for runs in measured.values()))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--algorithms", nargs="+", choices=("grpo", "ppo"), default=["grpo", "ppo"])
    parser.add_argument("--rollouts", nargs="+", choices=("transformers", "vllm"), default=["transformers", "vllm"])
    parser.add_argument("--backends", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    parser.add_argument("--systems", nargs="+", choices=("hybridflow", "trl"), default=["hybridflow", "trl"])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each system")
    parser.add_argument("--steps", type=int, default=8, help="steps of a process, the first two not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds after which a process is given up")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the workload's models and prompts are kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def measure_round(number: int, measured: dict[Case, list[Measured]], workload: Workload, effort: Effort) -> None:
    """Runs every case once and adds what it measured; a case that failed is reported and adds nothing."""
    for case, runs in measured.items():
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as scratch:
            try:
                run = measure(case, workload, effort, Path(scratch))
            except RunFailed as failure:
                logger.error("round %d  %s  FAILED\n%s", number, case.title, failure)
                continue
        runs.append(run)
        steps = " ".join(f"{seconds:.3f}" for seconds in run.step_seconds)
        logger.info("round %d  %s  load=%.1f  steps: %s", number, case.title, load, steps)


if __name__ == "__main__":
    raise SystemExit(main())
