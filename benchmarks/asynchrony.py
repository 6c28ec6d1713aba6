"""Asynchronous runs on Ray, next to the synchronous one: seconds per step, idle fractions of pools, and scores.

    python benchmarks/asynchrony.py [--experiments tail,turns,task] [--seeds 3] [--minutes 30]

`tail`: one response of 64 is ten times longer than the others, and a decoding step takes 50 ms however many rows it
has, as on the virtual clock and on a GPU with room for more rows. Goal: with partial rollouts, steps at least 1.6 times
as fast as synchronous ones, and within 10% of what the virtual clock predicts (`asynchrony_model.py`, with the seconds
that the synchronous run has measured).
`turns`: conversations of four turns, in an environment whose steps take 0.1 s, or 1 s for one prompt of 16. Goal: the
speed-up of `tail`.
`task`: the built-in task until it learns slowly, with responses as long as the model makes them. Goal: a final exact
match within 0.03 of the synchronous run's, as means over the seeds.

Runs take turns: with each seed, `synchronous`, `ahead` (a batch ahead) and `partial` (`asynchrony.partial_rollouts`, up
to 4 versions old; with a tail, two batches ahead).
Appends one line per run to benchmarks/results/asynchrony.jsonl and skips those that have one with the same settings, so
it can be stopped at any time; `--minutes` starts no run after that time. Ends with a table of all lines, and with
status 1 if a goal is not reached.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.asynchrony_model import simulated
from benchmarks.record import HERE, append_line, environment, read_lines
from benchmarks.tailed_environment import TURNS, step_seconds
from hybridflow.dataflows.groups import GroupQueue
from hybridflow.environments.running import environment_seed
from hybridflow.observability.trackers.jsonl import METRICS_FILE

RESULTS = HERE / "results" / "asynchrony.jsonl"
LEAST_SPEED_UP, MOST_MODEL_ERROR, MOST_SCORE_LOST = 1.6, 0.10, 0.03
WARM_UP = 3
"""Steps that are not counted: the first ones load code, and a run that goes ahead generates two batches in one."""

SHORT, TAIL, SHARE, GROUPS, SAMPLES, MILLISECONDS = 12, 10, 1 / 64, 8, 8, 50
"""With a tail: tokens of most responses, how many times longer the others are, the share of these, the groups and
samples of a step, and the duration of a decoding step."""

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
            request.max_response_tokens = tokens_of_row(SEED, *request.name)
        super()._start(requests)

    def _step(self):
        began = time.monotonic()
        finished = super()._step()
        time.sleep(max(0.0, 0.001 * MILLISECONDS - (time.monotonic() - began)))
        return finished
"""
ENVIRONMENT = HERE / "tailed_environment.py"
COMMON = (
    "trainer={backend: ray, devices: 2, threads: 1, save_every: 0, samples_every: 0, trackers: [jsonl]}",
    "placement={pools: {train: {devices: 1}, generate: {devices: 1}}, roles: {rollout: generate, reward: generate}}",
)
ACCURACY = "val-core/calculator/acc/mean@1"
POOLS = ("train", "generate")
TIMES = ("timing_s/step", "timing_s/gen", *(f"perf/idle_fraction/{pool}" for pool in POOLS))
SYNCHRONOUS, PARTIAL = "synchronous", "partial"
MODES: Mapping[str, Sequence[str]] = {
    SYNCHRONOUS: [],
    "ahead": ["asynchrony.max_staleness=1"],
    PARTIAL: ["asynchrony={max_staleness: 4, partial_rollouts: true}"],
}


def tokens_of_row(seed: int, uid: int, sample: int) -> int:
    """The length of a response, with a tail."""
    return SHORT * (TAIL if random.Random(f"{seed}/{uid}/{sample}").random() < SHARE else 1)


@dataclass(frozen=True)
class Experiment:
    """A run that is repeated in all modes."""

    steps: int
    words: Sequence[str]
    groups: int
    ahead: int
    """Batches ahead of a step with partial rollouts."""

    longest: Callable[[int, int], int]
    """The tokens of a group's longest response, or the milliseconds of its environments, by seed and uid."""


EXPERIMENTS = {
    "tail": Experiment(
        20,
        [
            f"data={{batch_size: {GROUPS}, max_response_tokens: {SHORT * TAIL}}}",
            f"rollout={{engine: FOLDER/tailed_{MILLISECONDS}ms.py:Tailed, samples_per_prompt: {SAMPLES}}}",
            "actor.minibatch_size=8",
            "trainer.eval_every=0",
        ],
        GROUPS,
        2,
        lambda seed, uid: max(tokens_of_row(seed, uid, sample) for sample in range(SAMPLES)),
    ),
    "turns": Experiment(
        20,
        [
            f"data={{batch_size: {GROUPS}, max_response_tokens: 24}}",
            f"rollout={{samples_per_prompt: {SAMPLES}, sampling: {{ignore_eos: true}}}}",
            f"environment={{name: 'FOLDER/{ENVIRONMENT.name}:Tailed', processes: {3 * GROUPS * SAMPLES}}}",
            f"environment={{max_turns: {TURNS}, max_turn_tokens: 4}}",
            "reward.functions=environment",
            "actor.minibatch_size=8",
            "trainer.eval_every=0",
        ],
        GROUPS,
        2,
        lambda seed, uid: round(1000 * TURNS * step_seconds(environment_seed(seed, uid))),
    ),
    "task": Experiment(200, ["actor.optimizer.learning_rate=1e-4", "trainer.eval_every=200"], 128, 1, lambda *_: 8),
}


@dataclass(frozen=True)
class Clock:
    """Mean seconds of a step and the idle fraction of each pool."""

    seconds: float
    idle: Mapping[str, float]


@dataclass(frozen=True)
class Line:
    """A run that ended well."""

    experiment: str
    mode: str
    seed: int
    words: Sequence[str]
    times: Mapping[str, Sequence[float]]
    """For each metric of `TIMES`, its values in the steps after the first ones; only synchronous steps have all."""

    score: float | None
    """Exact match on the held-out sums at the end."""

    load: Sequence[float] = field(default_factory=list)
    """The load averages of the machine after it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what has no line yet, and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after so many minutes")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * options.minutes
    for seed in range(options.seeds):
        for name in options.experiments.split(","):
            for mode in [*MODES] if seed % 2 == 0 else [*MODES][::-1]:
                if (name, mode, seed) not in lines() and time.monotonic() < deadline:
                    append(run(name, mode, seed))
    found = lines()
    for text in table(found):
        sys.stdout.write(text + "\n")
    return 0 if all(is_reached for name in EXPERIMENTS for _, is_reached in goals(name, found)) else 1


def words_of(name: str, mode: str, seed: int) -> list[str]:
    """The settings of a run; FOLDER stands for its folder."""
    experiment = EXPERIMENTS[name]
    own = [f"trainer={{seed: {seed}, total_steps: {experiment.steps}}}"]
    ahead = [f"asynchrony.ahead={experiment.ahead}"] if mode == PARTIAL else []
    return [*COMMON, *experiment.words, *own, *MODES[mode], *ahead]


def run(name: str, mode: str, seed: int) -> Line:
    """One run of the real command, in a process of its own."""
    words = words_of(name, mode, seed)
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as folder:
        engine = ENGINE.replace("SEED", str(seed)).replace("MILLISECONDS", str(MILLISECONDS))
        Path(folder, f"tailed_{MILLISECONDS}ms.py").write_text(engine)
        shutil.copy(ENVIRONMENT, folder)
        settings = [word.replace("FOLDER", folder) for word in (*words, "trainer.run_dir=FOLDER/run")]
        command = [sys.executable, "-m", "hybridflow", "grpo", *settings]
        ended = subprocess.run(command, env=environment(), cwd=HERE.parent, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{name} {mode} seed {seed} ended with status {ended.returncode}:\n{ended.stderr[-3000:]}")
        rows = read_lines(Path(folder, "run", METRICS_FILE))
    counted = [row for row in rows if row["step"] > WARM_UP]
    times = {metric: [round(row[metric], 4) for row in counted if metric in row] for metric in TIMES}
    return Line(name, mode, seed, words, times, rows[-1].get(ACCURACY), os.getloadavg())


def append(line: Line) -> None:
    """Adds a line to the results, and says so."""
    append_line(RESULTS, asdict(line))
    step = mean(line.times["timing_s/step"])
    sys.stderr.write(f"{line.experiment} {line.mode} seed {line.seed}: {step:.2f} s per step, score {line.score}\n")


def lines() -> dict[tuple[str, str, int], Line]:
    """The lines of the results with the current settings."""
    found = [Line(**line) for line in read_lines(RESULTS)]
    return {
        (line.experiment, line.mode, line.seed): line
        for line in found
        if line.experiment in EXPERIMENTS and line.words == words_of(line.experiment, line.mode, line.seed)
    }


def predicted(line: Line, mode: str) -> Clock:
    """A mode on the virtual clock, with the seconds that the synchronous run of `line` has measured."""
    experiment, step, generation = EXPERIMENTS[line.experiment], line.times["timing_s/step"], line.times["timing_s/gen"]
    groups, steps = experiment.groups, experiment.steps
    longest = partial(experiment.longest, line.seed)
    decoded = [max(longest(uid) for uid in range(groups * i, groups * (i + 1))) for i in range(WARM_UP, steps)]
    learn, token = mean(step) - mean(generation), sum(generation) / sum(decoded)
    if mode in (SYNCHRONOUS, PARTIAL):
        overlaps = mode == PARTIAL
        queue = GroupQueue(groups, *((experiment.ahead, 4) if overlaps else (0, 0)), steps)
        found = simulated(longest, queue, overlaps=overlaps, token_seconds=token, learn_seconds=learn)[WARM_UP:]
        seconds, generating = (
            mean(values) for values in zip(*((s.seconds, s.rollout_seconds) for s in found), strict=True)
        )
    else:  # a step learns while the next batch is generated
        seconds = mean(max(token * tokens, learn) for tokens in decoded[1:])
        generating = mean(token * tokens for tokens in decoded[1:])
    return Clock(seconds, {"train": 1.0 - learn / seconds, "generate": 1.0 - generating / seconds})


def speed_ups(name: str, mode: str, found: Mapping[tuple[str, str, int], Line]) -> list[tuple[float, float]]:
    """By seed: how many times as fast as the synchronous steps those of a mode are, and what is predicted."""
    pairs = []
    for experiment, each, seed in found:
        alone = found.get((name, SYNCHRONOUS, seed))
        if (experiment, each) == (name, mode) and alone is not None:
            seconds = mean(alone.times["timing_s/step"])
            own = mean(found[name, mode, seed].times["timing_s/step"])
            pairs.append((seconds / own, predicted(alone, SYNCHRONOUS).seconds / predicted(alone, mode).seconds))
    return pairs


def goals(name: str, found: Mapping[tuple[str, str, int], Line]) -> Iterator[tuple[str, bool]]:
    """The goals of an experiment, and whether its lines reach them."""
    if name != "task" and (pairs := speed_ups(name, PARTIAL, found)):
        speed_up, model = (mean(values) for values in zip(*pairs, strict=True))
        yield f"{speed_up:.2f} times as fast (goal: {LEAST_SPEED_UP:g})", speed_up >= LEAST_SPEED_UP
        error = abs(speed_up / model - 1.0)
        if name == "tail":
            yield f"predicted {model:.2f}, {error:.0%} off (goal: {MOST_MODEL_ERROR:.0%})", error <= MOST_MODEL_ERROR
    scores = {mode: scores_of(name, mode, found) for mode in MODES}
    for mode in MODES:
        if mode != SYNCHRONOUS and scores[mode] and scores[SYNCHRONOUS]:
            lost = mean(scores[SYNCHRONOUS]) - mean(scores[mode])
            yield f"{mode}: exact match {-lost:+.3f} (goal: above -{MOST_SCORE_LOST:g})", lost <= MOST_SCORE_LOST


def scores_of(name: str, mode: str, found: Mapping[tuple[str, str, int], Line]) -> list[float]:
    """The final scores of an experiment's runs in a mode."""
    own = [line for (experiment, each, _), line in found.items() if (experiment, each) == (name, mode)]
    return [line.score for line in own if line.score is not None]


def table(found: Mapping[tuple[str, str, int], Line]) -> Iterator[str]:
    """Means over the seeds of each experiment and mode, next to those of the virtual clock, and the goals."""
    yield (
        f"{'':19}{'seeds':>6}{'s/step':>8}{'model':>7}{'times as fast':>15}{'range':>13}{'model':>7}"
        f"{'train idle':>12}{'model':>7}{'generate idle':>15}{'model':>7}{'exact match':>13}"
    )
    for name in EXPERIMENTS:
        for mode in MODES:
            own = [line for (experiment, each, _), line in found.items() if (experiment, each) == (name, mode)]
            alone = [found[name, SYNCHRONOUS, line.seed] for line in own if (name, SYNCHRONOUS, line.seed) in found]
            if own and len(own) == len(alone):
                yield f"{name:6}{mode:13}{_row(name, own, [predicted(line, mode) for line in alone], found)}"
        for text, is_reached in goals(name, found):
            yield f"      {'reached' if is_reached else 'NOT REACHED'}: {text}"


def _row(name: str, own: Sequence[Line], clocks: Sequence[Clock], found: Mapping[tuple[str, str, int], Line]) -> str:
    mode = own[0].mode
    measured, model = zip(*speed_ups(name, mode, found), strict=True)

    def of(metric: str) -> float:
        return mean(mean(line.times[metric]) for line in own)

    text = f"{len(own):6}{of('timing_s/step'):8.2f}{mean(clock.seconds for clock in clocks):7.2f}{mean(measured):15.2f}"
    text += f"{f'{min(measured):.2f}-{max(measured):.2f}':>13}{mean(model):7.2f}"
    for pool, width in zip(POOLS, (12, 15), strict=True):
        text += f"{of(f'perf/idle_fraction/{pool}'):{width}.0%}{mean(clock.idle[pool] for clock in clocks):7.0%}"
    scores = scores_of(name, mode, found)
    return text + (f"{mean(scores):13.3f}" if scores else f"{'-':>13}")


if __name__ == "__main__":
    sys.exit(main())
