"""Does every algorithm learn? Each on the built-in task, to 0.75 exact match within its number of steps.

    python benchmarks/algorithms.py [--methods grpo,rloo] [--minutes 30] [--jobs 2]

Appends one line per (method, seed) to benchmarks/results/algorithms.jsonl and skips those that have one, so it can be
stopped at any time and then continues. Ends with a table of all lines, and with status 1 if one did not reach 0.75.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.record import append_line, read_lines

RESULTS = Path(__file__).parent / "results" / "algorithms.jsonl"
THRESHOLD = 0.75
LONGEST_SECONDS = 240
"""Time limit of a run; one that is cut off counts as failed."""

ACCURACY = "val-core/calculator/acc/mean@1"


@dataclass(frozen=True)
class Method:
    """How a method is run: `algorithm=NAME`, other settings, its steps, and the metric that must reach 0.75."""

    name: str
    steps: int = 100
    settings: tuple[str, ...] = ()
    seeds: int = 2
    metric: str = ACCURACY
    preset: str | None = None
    """The NAME, where it is not the method's own."""

    @property
    def added(self) -> list[str]:
        """Arguments of `python -m hybridflow.trainer.main_ppo` that select it."""
        return [f"algorithm={self.preset or self.name}", *self.settings]


SLOWER = ("actor.optimizer.learning_rate=1e-4",)
"""For losses that do not stop at a bound: at the task's rate four optimizer steps per batch take the policy too far."""

METHODS = (
    Method("gae", preset="ppo", steps=100, seeds=3),
    Method("grpo", seeds=3),
    Method("dr_grpo"),
    Method("rloo", seeds=3),
    Method("remax", steps=160, seeds=3),
    Method("reinforce_plus_plus", steps=100),
    Method("reinforce_plus_plus_baseline"),
    Method("opo"),
    Method("gpg", steps=140, settings=("actor.minibatch_size=null",)),
    Method(
        "grpo_passk",
        settings=("rollout.eval_samples_per_prompt=2",),
        metric="val-core/calculator/acc/pass@2",
    ),
    Method(
        "gdpo",
        settings=("reward.functions=[exact_match,format]", r"reward.settings.format.pattern='\d{2,3}'"),
        metric="val-aux/calculator/exact_match/mean",
    ),
    Method("optimal_token_baseline"),
    Method("gspo"),
    Method("cispo", steps=140, settings=SLOWER),
    Method("sapo", steps=140, settings=SLOWER),
    Method("gmpo"),
    Method("clip_cov"),
    Method("kl_cov", steps=120, settings=("algorithm.loss_settings.fraction=0.05",)),
    Method("dppo_tv"),
    Method("dppo_kl"),
    Method("dro"),
    Method("dapo"),
    Method("pf_ppo", steps=100),
    Method("ppo_ptx", steps=100),
    Method("safe_rlhf", steps=100),
)


@dataclass(frozen=True)
class Outcome:
    """One run: the metric before and after, its best, and the first evaluation at which it had reached 0.75."""

    method: str
    seed: int
    steps: int
    seconds: float
    first: float | None = None
    last: float | None = None
    best: float | None = None
    reached: int | None = None
    curve: list[tuple[int, float]] = field(default_factory=list)
    error: str = ""
    settings: list[str] = field(default_factory=list)
    metric: str = ACCURACY

    @property
    def is_good(self) -> bool:
        """It began below the threshold and ended above it, within its time."""
        if self.error or self.first is None or self.last is None:
            return False
        return self.first < THRESHOLD <= self.last


def main() -> int:
    """Runs what has no line yet; the status is 1 where a method fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", help="names, separated by commas; all by default")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no run after so many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    options = parser.parse_args()
    names = options.methods.split(",") if options.methods else [method.name for method in METHODS]
    unknown = set(names) - {method.name for method in METHODS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; methods: {', '.join(m.name for m in METHODS)}")
    deadline = time.monotonic() + 60 * options.minutes
    due = [(method, seed) for method, seed in wanted(names) if (method.name, seed) not in finished()]

    def one(item: tuple[Method, int]) -> None:
        if time.monotonic() < deadline:
            append(run(*item))

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, due))
    outcomes = [outcome for outcome in lines() if outcome.method in names]
    sys.stdout.write(table(outcomes))
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def wanted(names: Sequence[str]) -> Iterator[tuple[Method, int]]:
    """All (method, seed): first seeds of all methods first."""
    for seed in range(max(method.seeds for method in METHODS)):
        yield from ((method, seed) for method in METHODS if method.name in names and seed < method.seeds)


def run(method: Method, seed: int) -> Outcome:
    """One run of the real command, in a process of its own."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hybridflow.trainer.main_ppo", *method.added]
        command += [f"trainer.seed={seed}", f"trainer.total_steps={method.steps}", f"trainer.run_dir={folder}/run"]
        command += ["trainer.eval_every=10", "trainer.save_every=0", "trainer.samples_every=0", "trainer.threads=1"]
        command += ["trainer.trackers=[jsonl]", "trainer.device=cpu"]
        try:
            ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST_SECONDS)
            error = "" if ended.returncode == 0 else ended.stderr[-500:]
        except subprocess.TimeoutExpired:
            error = f"cut off after {LONGEST_SECONDS} s"
        seconds = time.perf_counter() - started
        curve = evaluations(Path(folder) / "run" / "metrics.jsonl", method.metric)
    scores = [score for _, score in curve]
    reached = next((step for step, score in curve if score >= THRESHOLD), None)
    outcome = Outcome(method.name, seed, method.steps, seconds, settings=method.added, metric=method.metric)
    if not scores:
        return replace(outcome, error=error or f"no {method.metric}")
    return replace(
        outcome, first=scores[0], last=scores[-1], best=max(scores), reached=reached, curve=curve, error=error
    )


def evaluations(file: Path, metric: str) -> list[tuple[int, float]]:
    """(step, score) of every evaluation of a run, also of one that was cut off."""
    return [(row["step"], row[metric]) for row in read_lines(file) if metric in row]


def finished() -> set[tuple[str, int]]:
    """The (method, seed) that have a line of a run that came to its end."""
    return {(outcome.method, outcome.seed) for outcome in lines() if not outcome.error}


def lines() -> list[Outcome]:
    """The last line of each (method, seed) of the results."""
    outcomes = (Outcome(**line) for line in read_lines(RESULTS))
    return list({(outcome.method, outcome.seed): outcome for outcome in outcomes}.values())


def append(outcome: Outcome) -> None:
    """Adds a line, and says so."""
    append_line(RESULTS, asdict(outcome))
    sys.stderr.write(line_of(outcome))


def table(outcomes: Sequence[Outcome]) -> str:
    """All outcomes, in the order of the methods."""
    order = {method.name: number for number, method in enumerate(METHODS)}
    head = f"{'method':30} {'seed':>4} {'before':>7} {'after':>7} {'best':>7} {'0.75 at':>8} {'steps':>6} {'s':>6}\n"
    return head + "".join(line_of(outcome) for outcome in sorted(outcomes, key=lambda o: (order[o.method], o.seed)))


def line_of(outcome: Outcome) -> str:
    """One line of the table."""
    shown = [
        f"{score:7.3f}" if score is not None else "      -" for score in (outcome.first, outcome.last, outcome.best)
    ]
    reached = "-" if outcome.reached is None else str(outcome.reached)
    end = f"  {outcome.error.strip().splitlines()[-1][:60]}" if outcome.error else "" if outcome.is_good else "  short"
    return (
        f"{outcome.method:30} {outcome.seed:4} {' '.join(shown)} {reached:>8} {outcome.steps:6} {outcome.seconds:6.0f}"
        f"{end}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
