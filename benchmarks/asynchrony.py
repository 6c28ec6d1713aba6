"""Seconds per step of a synchronous run and of asynchronous ones, on Ray; the rollout has its own pool.

    python benchmarks/asynchrony.py --steps 12 --reward-seconds 0.5
    python benchmarks/asynchrony.py --steps 20 --tail 10 --token-seconds 0.02

All runs have the same settings and seed, and take turns: `synchronous`, `ahead` (a batch ahead), and `partial`
(`asynchrony.partial_rollouts`). Prints one JSON line: the median seconds of a step after the first three, the speed-ups
and the idle fraction of each pool. `--reward-seconds` adds a pause to each call of the reward, as a judge or a sandbox
would take. `--tail` injects a tail: one response of 64 is so many times longer than the others, and a decoding step
takes `--token-seconds`. Mean seconds of a step are then printed next to those of `asynchrony_model.py`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.asynchrony_model import mean_seconds, simulated
from hybridflow.dataflows.groups import GroupQueue

REWARD = """
import time

def right(completions, answer, **columns):
    time.sleep({seconds})
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""
ENGINE = """
import time

from benchmarks.asynchrony import tokens_of_row
from hybridflow.engines.rollout.transformers.engine import TransformersEngine

class Tailed(TransformersEngine):
    def __init__(self, setup):
        model, mesh = setup.load_model(), setup.ranks.mesh
        super().__init__(model, max_sequences=256, eos_token_ids=(), tokenizer=setup.tokenizer, mesh=mesh)

    def _start(self, requests):
        for request in requests:
            request.max_response_tokens = tokens_of_row(*request.name, tail={tail})
        super()._start(requests)

    def _step(self):
        began = time.monotonic()
        finished = super()._step()
        time.sleep(max(0.0, {seconds} - (time.monotonic() - began)))
        return finished
"""
POOLS = "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: generate}}"
WARM_UP = 3
"""Steps that are not counted: the first ones load code, and a run that goes ahead generates two batches in one."""

SHORT, SHARE, GROUPS, SAMPLES = 12, 1 / 64, 8, 8
"""With a tail: tokens of most responses, the share of the others, and the groups and samples of a step."""

MODES: Mapping[str, Sequence[str]] = {
    "synchronous": [],
    "ahead": ["asynchrony.max_staleness=1"],
    "partial": ["asynchrony={max_staleness: 4, ahead: 2, partial_rollouts: true}"],
}


def tokens_of_row(uid: int, sample: int, *, tail: int) -> int:
    """The length of a response."""
    return SHORT * (tail if random.Random(f"{uid}/{sample}").random() < SHARE else 1)


def main() -> None:
    """Measures, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--reward-seconds", type=float, default=0.0)
    parser.add_argument("--tail", type=int, default=0)
    parser.add_argument("--token-seconds", type=float, default=0.02)
    arguments = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(arguments.repeats):
            for mode in [*MODES] if repeat % 2 == 0 else [*MODES][::-1]:
                rows[mode] += run(arguments, Path(folder) / f"{repeat}_{mode}", mode)
    seconds = {mode: median(found, "timing_s/step") for mode, found in rows.items()}
    pools = ("train", "generate")
    idle = {
        mode: {pool: round(median(found, f"perf/idle_fraction/{pool}"), 3) for pool in pools}
        for mode, found in rows.items()
    }
    result = {**vars(arguments), "seconds": rounded(seconds), "speed_up": speed_ups(seconds), "idle_fraction": idle}
    if arguments.tail:
        means = {mode: statistics.mean(row["timing_s/step"] for row in found) for mode, found in rows.items()}
        model = predicted(arguments, rows["synchronous"])
        result |= {"mean_seconds": rounded(means), "mean_speed_up": speed_ups(means)}
        result |= {"model_seconds": rounded(model), "model_speed_up": speed_ups(model)}
    print(json.dumps(result))


def run(arguments: argparse.Namespace, folder: Path, mode: str) -> list[dict[str, float]]:
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
        *MODES[mode],
    ]
    if arguments.tail:
        text = ENGINE.format(tail=arguments.tail, seconds=arguments.token_seconds)
        (folder / "tailed.py").write_text(text)
        words += [
            f"data={{batch_size: {GROUPS}, max_response_tokens: {SHORT * arguments.tail}}}",
            f"rollout={{engine: {folder}/tailed.py:Tailed, samples_per_prompt: {SAMPLES}}}",
            "actor.minibatch_size=8",
        ]
    command = [sys.executable, "-m", "hybridflow.cli.main", arguments.algorithm, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ})
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > WARM_UP]


def predicted(arguments: argparse.Namespace, synchronous: list[dict[str, float]]) -> dict[str, float]:
    """Mean seconds of a step on the virtual clock, with the seconds that the synchronous run has measured."""

    def longest(uid: int) -> int:
        return max(tokens_of_row(uid, sample, tail=arguments.tail) for sample in range(SAMPLES))

    steps = [int(row["step"]) - 1 for row in synchronous]
    decoded = [max(longest(uid) for uid in range(GROUPS * step, GROUPS * (step + 1))) for step in steps]
    generation = sum(row["timing_s/gen"] for row in synchronous)
    clock = {
        "token_seconds": generation / sum(decoded),
        "learn_seconds": statistics.mean(row["timing_s/step"] - row["timing_s/gen"] for row in synchronous),
    }
    alone, ahead = (GroupQueue(GROUPS, depth, oldest, arguments.steps) for depth, oldest in ((0, 0), (2, 4)))
    return {
        "synchronous": mean_seconds(simulated(longest, alone, overlaps=False, **clock), skipped=WARM_UP),
        "partial": mean_seconds(simulated(longest, ahead, **clock), skipped=WARM_UP),
    }


def speed_ups(seconds: Mapping[str, float]) -> dict[str, float]:
    """The quotients of the synchronous run's seconds and the others'."""
    return rounded({mode: seconds["synchronous"] / own for mode, own in seconds.items() if mode != "synchronous"})


def rounded(numbers: Mapping[str, float]) -> dict[str, float]:
    """Three decimals."""
    return {name: round(number, 3) for name, number in numbers.items()}


def median(rows: list[dict[str, float]], name: str) -> float:
    """The median of a metric."""
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    main()
