"""Evidence of what killed a run: a lack of memory, or a restart of the machine."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import psutil

from hybridflow.doctor.finding import Finding, ok, problem, skipped, warning
from hybridflow.doctor.run.directory import RunDirectory

_KILLED = re.compile(r"\[\s*(?P<uptime>\d+\.\d+)\].*Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)")
_DMESG = "dmesg"
_DMESG_SECONDS = 10.0
_CGROUP_KILLS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))
_MARGIN = timedelta(minutes=2)
_FULL = 0.92
_MEMORY = "perf/cpu_memory_used_gb"
_LESS_MEMORY = (
    "Use less memory (lower actor.microbatch_tokens or rollout.max_sequences, set trainer.snapshot_fraction=0), or a"
    " machine or container with more."
)
_OF_A_RUN = ("python", "ray", "hybridflow", "VLLM")
"""The beginnings of the names of a run's processes."""

_WORDS = ("WorkerDied", "out of memory", "OutOfMemory")


class Kill(NamedTuple):
    """A process that the kernel killed."""

    time: datetime
    pid: int
    name: str


@lru_cache
def kills(run: RunDirectory) -> tuple[Finding, ...]:
    """Evidence of what killed the run or one of its workers."""
    return tuple(_evidence(run))


def _evidence(run: RunDirectory) -> Iterator[Finding]:
    is_of_memory = run.ending is not None and any(word in run.ending.said for word in _WORDS)
    if run.is_alive or not (run.was_killed or is_of_memory):
        return
    yield from _memory(run)
    if run.start is None:
        return
    if not run.start.is_here:
        yield skipped("kernel", f"the run was on {run.start.host}: only the kernel's log there can say")
        return
    since, until = run.start.time - _MARGIN, (run.last_sign or datetime.now()) + _MARGIN
    booted = datetime.fromtimestamp(psutil.boot_time())
    if run.was_killed and since < booted and run.last_sign is not None and run.last_sign <= booted:
        yield problem("killed by", f"a restart of this machine at {booted:%Y-%m-%d %H:%M:%S}")
        return
    yield from _kernel(run, since, until)


def _kernel(run: RunDirectory, since: datetime, until: datetime) -> Iterator[Finding]:
    found = _kernel_kills()
    if found is None:
        count = _cgroup_kills()
        if count:
            yield problem(
                "killed by",
                f"the memory limit of this container, perhaps: it has ended {count} of its processes since it started",
                _LESS_MEMORY,
            )
        else:
            yield skipped(
                "kernel", "its log cannot be read here, so a lack of memory is not excluded (dmesg needs more rights)"
            )
        return
    if own := kills_of_run(found, run.start.pid if run.start else 0, since, until):
        kill = own[-1]
        yield problem(
            "killed by",
            f"the kernel, for a lack of memory at {kill.time:%H:%M:%S}: process {kill.pid} ({kill.name})",
            _LESS_MEMORY,
        )
    else:
        yield ok("kernel", "its log shows no process of the run that was killed for lack of memory at that time")


def kills_of_run(found: Sequence[Kill], pid: int, since: datetime, until: datetime) -> list[Kill]:
    """Those of the process with this id; else those at the end that may be of its workers, whose ids are not known."""
    during = [kill for kill in found if since <= kill.time <= until]
    own = [kill for kill in during if kill.pid == pid]
    return own or [kill for kill in during if kill.time >= until - 2 * _MARGIN and kill.name.startswith(_OF_A_RUN)]


def _kernel_kills() -> list[Kill] | None:
    """The processes that the kernel killed for a lack of memory; None if its log cannot be read."""
    if shutil.which(_DMESG) is None:
        return None
    try:
        done = subprocess.run([_DMESG], capture_output=True, timeout=_DMESG_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return kills_in(done.stdout.decode(errors="replace"), datetime.fromtimestamp(psutil.boot_time()))


def kills_in(log: str, booted: datetime) -> list[Kill]:
    """The processes that a kernel's log names as killed for a lack of memory."""
    return [
        Kill(booted + timedelta(seconds=float(found["uptime"])), int(found["pid"]), found["name"])
        for found in filter(None, map(_KILLED.search, log.splitlines()))
    ]


def _cgroup_kills() -> int:
    """The processes that this container's memory limit has ended."""
    for path in _CGROUP_KILLS:
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields.get("oom_kill", 0))
        except (OSError, ValueError):
            continue
    return 0


def _memory(run: RunDirectory) -> Iterator[Finding]:
    total = run.start.memory_gb if run.start else None
    used = run.rows.get(run.last_step, {}).get(_MEMORY)
    if not isinstance(used, float) or not total:
        return
    found = f"{used:.1f} of {total} GiB were in use after step {run.last_step}"
    if used > _FULL * total:
        yield warning("memory", found, _LESS_MEMORY)
    else:
        yield ok("memory", found)
