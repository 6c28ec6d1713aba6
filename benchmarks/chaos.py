"""Do runs on Ray survive faults of their processes, and with the numbers of a run without faults?

    python benchmarks/chaos.py [--faults 200] [--layouts together,apart,critic] [--seconds 6] [--least 0] [--steps 30]

Starts runs of the built-in task, with the copies in memory that `trainer.snapshot_fraction` allows and a checkpoint
every 10 steps. In each, at random moments, random worker processes are killed (SIGKILL) or stopped (SIGSTOP), or the
reward function raises an error, until the run ends. Each run is compared with one of the same layout without faults:
every metric that a seed determines must be equal, to the last bit.

With `--seconds 6`, the next fault often comes before new spare processes are ready. With `--least 25 --steps 150`, it
comes later, as faults of a real run do.

The layout `vllm` (not by default) has a rollout with vLLM in a pool of its own, whose recoveries the table shows apart.

Appends one line per run to benchmarks/results/chaos.jsonl and skips the seeds that have one with the same options, so
it can be stopped at any time and then continues until the lines of its layouts and options have `--faults` faults. Ends
with a table of all lines, and with status 1 if a run was lost or had other numbers.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.record import HERE, append_line, environment, read_lines
from hybridflow.config.faults import MOST_IN_STEP
from hybridflow.observability.fault_ledger import FAULTS_FILE
from hybridflow.observability.jsonlines import Json, read_rows, rows_by_step
from hybridflow.observability.trackers.jsonl import METRICS_FILE

RESULTS = HERE / "results" / "chaos.jsonl"
LONGEST_SECONDS = 900
INJECTED_IN_STEP = MOST_IN_STEP - 2
"""Faults before the next row of metrics, which comes later than its step: with more than `MOST_IN_STEP` in one step, a
run ends."""

USEFUL_SECONDS = 300.0
"""Useful work between two faults, for the effective training time."""

SPARE_FRACTION = 0.2
"""How often an idle spare process is killed or stopped before a fault; the run must not notice."""

TIMING = ("timing_s/", "perf/")
"""Metrics that begin so are not determined by the seed."""

COMMON = (
    "trainer.backend=ray",
    "trainer.devices=2",
    "trainer.threads=1",
    "trainer.eval_every=10",
    "trainer.save_every=10",
    "trainer.max_faults=100",
    "trainer.hang_timeout_seconds=15",
    "trainer.faults.user_code=retry",
    "trainer.resume=never",
    "trainer.trackers=[jsonl]",
)
VLLM = "vllm"
LAYOUTS = {
    "together": ("grpo",),
    "apart": (
        "grpo",
        "placement={pools: {training: {devices: 1}, generation: {devices: 1}}}",
        "placement={roles: {actor: training, rollout: generation, reward: generation}}",
    ),
    "critic": (
        "ppo",
        "placement={pools: {policy: {devices: 1}, values: {devices: 1}}}",
        "placement={roles: {actor: policy, rollout: policy, reward: policy, critic: values, reference: values}}",
    ),
    VLLM: (
        "grpo",
        "rollout.engine=vllm",
        "placement={pools: {training: {devices: 1}, generation: {devices: 1}}}",
        "placement={roles: {actor: training, rollout: generation, reward: generation}}",
    ),
}
DEFAULT = tuple(name for name in LAYOUTS if name != VLLM)
"""The layouts unless others are given; the seed selects one by its position."""

FIELDS = ("step", "fault", "kind", "role", "rank", "method", "pools", "resumed_step", "seconds", "cost_seconds")
WORKER, SPARE = "ray::RayHost", "ray::SpareHost"
"""Titles of processes: those of ranks, and idle ones that replace them."""

KINDS: tuple[str, ...] = ("SIGKILL", "SIGKILL", "SIGSTOP", "exception")

REWARD = """from pathlib import Path

from hybridflow.rewards.functions.exact_match import exact_match

TRAP = Path(__file__).with_name("trap")


def score(prompts, completions, **columns):
    if TRAP.exists():
        TRAP.unlink()
        raise RuntimeError("chaos")
    return exact_match(prompts, completions, **columns)
"""
"""A reward function that raises an error once for each trap file."""


@dataclass(frozen=True)
class Moments:
    """When faults occur: after `least` seconds without one, and then `seconds` more on average, in runs of `steps`."""

    seconds: float = 6.0
    least: float = 0.0
    steps: int = 30

    def pause(self, choose: random.Random) -> float:
        """The seconds until the next fault."""
        return self.least + min(choose.expovariate(1 / self.seconds), 4 * self.seconds)


@dataclass(frozen=True)
class Line:
    """The result of a run with faults."""

    layout: str
    seed: int
    ended: bool
    """Whether it reached its last step."""

    equal: bool
    """Whether all metrics are those of the run without faults."""

    injected: Mapping[str, int]
    faults: Sequence[Mapping[str, object]]
    """From the run's own record, `faults.jsonl`: these `FIELDS` of each fault. The first lines lack `cost_seconds`."""

    seconds: float
    seconds_without: float
    words: str
    """The last words of a run that did not end well."""

    moments: Moments = Moments()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until there are enough faults, and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--layouts", default=",".join(DEFAULT))
    parser.add_argument("--seconds", type=float, default=6.0, help="mean seconds between a recovery and the next fault")
    parser.add_argument("--least", type=float, default=0.0, help="seconds that are added to each of these")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    options = parser.parse_args(argv)
    layouts, seed = options.layouts.split(","), 0
    moments = Moments(options.seconds, options.least, options.steps)

    def like_these() -> list[Line]:
        return [line for line in lines() if line.layout in layouts and line.moments == moments]

    def survived() -> int:
        return sum(len(line.faults) for line in like_these())

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        whole: dict[str, tuple[dict, float]] = {}
        while survived() < options.faults:
            layout, seed = layouts[seed % len(layouts)], seed + 1
            if any((line.layout, line.seed) == (layout, seed) for line in like_these()):
                continue
            if layout not in whole:
                whole[layout] = undisturbed(Path(folder) / f"{layout}-whole", layout, moments.steps)
            line = disturbed(Path(folder) / f"{layout}-{seed}", layout, seed, moments, *whole[layout])
            append_line(RESULTS, asdict(line))
            _say(f"{layout} seed {seed}: {'ended' if line.ended else 'LOST'}, {line.injected}, equal={line.equal}")
    found = lines()
    for each in sorted({line.moments for line in found}, key=astuple):
        _say(f"\nRuns of {each.steps} steps, {each.least:g} s and {each.seconds:g} s on average between faults")
        for text in table([line for line in found if line.moments == each]):
            _say(text)
    return 0 if all(line.ended and line.equal for line in found) else 1


def undisturbed(folder: Path, layout: str, steps: int) -> tuple[dict, float]:
    """The numbers and the seconds of a run without faults."""
    began = time.monotonic()
    if status := started(folder, layout, steps).wait():
        raise SystemExit(f"The run without faults ended with status {status}:\n{_last_words(folder)}")
    return numbers(folder / "run"), time.monotonic() - began


def started(folder: Path, layout: str, steps: int) -> subprocess.Popen[bytes]:
    """Starts a run of a layout in `folder`; its run directory is `folder/run`."""
    folder.mkdir()
    reward = folder / "reward.py"
    reward.write_text(REWARD)
    name, *settings = LAYOUTS[layout]
    words = [
        *COMMON,
        *settings,
        f"trainer.total_steps={steps}",
        f"reward.functions=[{reward}:score]",
        f"trainer.run_dir={folder / 'run'}",
    ]
    with (folder / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "hybridflow", name, *words]
        return subprocess.Popen(command, env=environment(), stdout=output, stderr=output, cwd=HERE.parent)


def disturbed(folder: Path, layout: str, seed: int, moments: Moments, wanted: dict, seconds_without: float) -> Line:
    """A run with faults at random moments."""
    choose, injected, began = random.Random(seed), dict.fromkeys(KINDS, 0), time.monotonic()
    process = started(folder, layout, moments.steps)
    run_dir, in_step = folder / "run", Counter[int]()
    while process.poll() is None and time.monotonic() - began < LONGEST_SECONDS:
        time.sleep(moments.pause(choose))
        if process.poll() is not None or not (done := numbers(run_dir)) or in_step[max(done)] == INJECTED_IN_STEP:
            continue
        in_step[max(done)] += 1
        before = len(ledger(run_dir))
        if (kind := inject(choose, process.pid, folder / "trap")) is None:
            continue
        injected[kind] += 1
        while process.poll() is None and len(ledger(run_dir)) == before and time.monotonic() - began < LONGEST_SECONDS:
            time.sleep(0.2)
    if process.poll() is None:
        process.kill()
    status = process.wait()
    found, words = numbers(run_dir), _last_words(folder)
    faults = [{name: row[name] for name in FIELDS if name in row} for row in ledger(run_dir)]
    return Line(
        layout, seed, status == 0 and max(found, default=0) == moments.steps, found == wanted, injected, faults,
        time.monotonic() - began, seconds_without, "" if status == 0 else words, moments,
    )  # fmt: skip


def inject(choose: random.Random, pid: int, trap: Path) -> str | None:
    """Causes a fault in the run of this driver; returns its kind, or None if there was no process to hit."""
    if (spares := list(processes_of(pid, SPARE))) and choose.random() < SPARE_FRACTION:
        with suppress(psutil.NoSuchProcess):
            choose.choice(spares).send_signal(choose.choice((signal.SIGKILL, signal.SIGSTOP)))
    kind = choose.choice(KINDS)
    if kind == "exception":
        trap.touch()
        return kind
    if workers := list(processes_of(pid, WORKER)):
        with suppress(psutil.NoSuchProcess):
            choose.choice(workers).send_signal(getattr(signal, kind))
            return kind
    return None


def processes_of(pid: int, title: str) -> Iterator[psutil.Process]:
    """The processes of a run whose titles begin so and which are not stopped, in a fixed order."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for child in sorted(children, key=lambda process: process.pid):
        try:
            words = child.cmdline()
            if words and words[0].startswith(title) and child.status() != psutil.STATUS_STOPPED:
                yield child
        except psutil.Error:
            continue


def numbers(run_dir: Path) -> dict[int, dict[str, Json]]:
    """By step, the metrics that the seed determines."""
    return {
        step: {name: value for name, value in row.items() if not name.startswith(TIMING)}
        for step, row in rows_by_step(run_dir / METRICS_FILE).items()
    }


def ledger(run_dir: Path) -> list[dict]:
    """The faults that the run has recorded."""
    return [row for _, row in read_rows(run_dir / FAULTS_FILE)]


def lines() -> list[Line]:
    """All results so far."""
    return [Line(**{**line, "moments": Moments(**line.get("moments", {}))}) for line in read_lines(RESULTS)]


def table(found: Sequence[Line]) -> Iterator[str]:
    """Runs by layout; seconds of recovery by what was lost, and by kind of fault; the effective training time."""
    yield f"{'layout':12}{'runs':>6}{'ended':>7}{'equal':>7}{'faults':>8}{'effective':>11}"
    for layout in LAYOUTS:
        own = [line for line in found if line.layout == layout]
        if own:
            faults = sum(sum(line.injected.values()) for line in own)
            useful = sum(line.seconds_without for line in own) / sum(line.seconds for line in own)
            ended, equal = sum(line.ended for line in own), sum(line.equal for line in own)
            yield f"{layout:12}{len(own):6}{ended:7}{equal:7}{faults:8}{useful:11.0%}"
    faults = [{**fault, "layout": line.layout} for line in found for fault in line.faults]
    yield f"\n{'recovery of':40}{_COLUMNS}"
    yield from _recoveries(faults, lost)
    yield f"\n{'recovery from':40}{_COLUMNS}"
    yield from _recoveries(faults, lambda fault: f"{fault['fault']} of {fault.get('role', '')}")
    if costs := numbers_of(faults, "cost_seconds"):
        share = USEFUL_SECONDS / (USEFUL_SECONDS + mean(costs))
        yield (
            f"\nA fault costs {mean(costs):.1f} s (mean of {len(costs)}): at one per {USEFUL_SECONDS:g} s of useful"
            f" work, the effective training time is {share:.1%}."
        )


def lost(fault: Mapping[str, object]) -> str:
    """The part of the run that a fault has hit: the reward function, a process with a trained model, or one without, in
    which vLLM may have to start again."""
    if fault["fault"] == "WorkerError":
        return "the reward function"
    trains = {"actor", "critic"} & {*str(fault.get("role", "")).split("+")}
    rollout = "a rollout process with vLLM" if fault.get("layout") == VLLM else "a rollout process"
    return "a training process" if trains else rollout


def numbers_of(faults: Sequence[Mapping[str, object]], name: str) -> list[float]:
    """A number of each fault that has it."""
    return [value for fault in faults if isinstance(value := fault.get(name), int | float)]


_COLUMNS = f"{'times':>6}{'median s':>10}{'worst s':>9}{'median cost s':>15}{'worst cost s':>14}"


def _recoveries(faults: Sequence[Mapping[str, object]], group: Callable[[Mapping[str, object]], str]) -> Iterator[str]:
    by_group: dict[str, list[Mapping[str, object]]] = defaultdict(list)
    for fault in faults:
        by_group[group(fault)].append(fault)
    for name, own in sorted(by_group.items()):
        if seconds := numbers_of(own, "seconds"):
            costs = numbers_of(own, "cost_seconds")
            cost = f"{median(costs):15.1f}{max(costs):14.1f}" if costs else f"{'-':>15}{'-':>14}"
            yield f"{name:40}{len(seconds):6}{median(seconds):10.1f}{max(seconds):9.1f}{cost}"


def _last_words(folder: Path) -> str:
    return (folder / "output.txt").read_text(errors="replace")[-2000:]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
