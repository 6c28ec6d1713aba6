"""Seconds per step of a synchronous run and of one that generates a batch ahead, on Ray; the rollout has its own pool.

    python benchmarks/asynchrony.py --steps 12 --reward-seconds 0.5

Both runs have the same settings and seed, and take turns. Prints one JSON line: the median seconds of a step after the
first three, their quotient, and the idle fraction of each pool. `--reward-seconds` adds a pause to each call of the
reward, as a judge or a sandbox would take.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REWARD = """
import time

def right(completions, answer, **columns):
    time.sleep({seconds})
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""
POOLS = "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: generate}}"
WARM_UP = 3
"""Steps that are not counted: the first ones load code, and a run that goes ahead generates two batches in one."""


def main() -> None:
    """Measures, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for staleness in (0, 1) if repeat % 2 == 0 else (1, 0):
                rows[staleness] += run(arguments, Path(folder) / f"{repeat}_{staleness}", staleness)
    seconds = {staleness: median(found, "timing_s/step") for staleness, found in rows.items()}
    print(
        json.dumps(
            {
                **vars(arguments),
                "synchronous_seconds": round(seconds[0], 4),
                "ahead_seconds": round(seconds[1], 4),
                "speed_up": round(seconds[0] / seconds[1], 3),
                "idle_fraction": {
                    name: {
                        pool: round(median(rows[k], f"perf/idle_fraction/{pool}"), 3) for pool in ("train", "generate")
                    }
                    for k, name in enumerate(("synchronous", "ahead"))
                },
            }
        )
    )


def run(arguments: argparse.Namespace, folder: Path, staleness: int) -> list[dict[str, float]]:
    """The rows of a run's steps after the first ones."""
    folder.mkdir()
    (folder / "judge.py").write_text(REWARD.format(seconds=arguments.reward_seconds))
    words = [
        "trainer={backend: ray, devices: 2, eval_every: 0, save_every: 0, threads: 1}",
        "data.batch_size=32",
        f"trainer.total_steps={arguments.steps}",
        f"trainer={{run_dir: {folder}/run, trackers: [jsonl]}}",
        f"reward.functions=[{folder}/judge.py:right]",
        POOLS,
        f"asynchrony.max_staleness={staleness}",
    ]
    command = [sys.executable, "-m", "hybridflow.cli.main", arguments.algorithm, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ})
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > WARM_UP]


def median(rows: list[dict[str, float]], name: str) -> float:
    """The median of a metric."""
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    main()
