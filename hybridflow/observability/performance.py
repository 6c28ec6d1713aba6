"""Metrics of time, throughput and memory: `timing_s/*` and `perf/*`."""

import math
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from codetiming import Timer

from hybridflow.observability.calls import Section
from hybridflow.observability.metrics import Metrics, last, maximum, total


class StageTimers:
    """Seconds per stage since the last `reset`; stages may nest, and a stage that runs twice adds up.

        timers.reset()
        with timers.stage("step"):
            with timers.stage("gen"):
                ...
        timers.metrics()  # timing_s/gen, timing_s/step

    `on_stage` is called with the stage that begins, and the enclosing one (or None) when it ends; `on_part` with the
    current stage, and how much of it is done, when the stage calls `part`.
    """

    def __init__(
        self,
        on_stage: Callable[[str | None], None] | None = None,
        on_part: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._on_stage = on_stage
        self._on_part = on_part

    def reset(self) -> None:
        """Forgets the measurements, as at the start of a step."""
        self._seconds.clear()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures the block as part of stage `name`, even if it raises."""
        timer = Timer(logger=None)
        self._running.append(name)
        self._tell()
        timer.start()
        try:
            yield
        finally:
            self.add(name, timer.stop())
            self._running.pop()
            self._tell()

    def part(self, done: int, total: int) -> None:
        """Reports that `done` of `total` rows of the current stage are done."""
        if self._on_part is not None and self._running:
            self._on_part(self._running[-1], done, total)

    def add(self, name: str, seconds: float) -> None:
        """Adds seconds that were measured elsewhere, such as in a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> Metrics:
        """`timing_s/<stage>` for every stage that has ended."""
        return {f"timing_s/{name}": total(seconds) for name, seconds in self._seconds.items()}

    def _tell(self) -> None:
        if self._on_stage is not None:
            self._on_stage(self._running[-1] if self._running else None)


def throughput(tokens: int, seconds: float, samples: int, *, devices: int = 1) -> Metrics:
    """`perf/*` of one step; `perf/throughput` is tokens (prompt and response) per second per device, as in verl.

    `seconds` is the duration of the whole step; if it is 0, so is the throughput.
    """
    rate = 1.0 / seconds if seconds > 0.0 else 0.0
    return {
        "perf/total_num_tokens": total(tokens),
        "perf/time_per_step": last(seconds),
        "perf/throughput": last(tokens * rate / devices),
        "perf/samples_per_second": last(samples * rate),
    }


def call_metrics(section: Section) -> Metrics:
    """`perf/critical_path_seconds`, and `perf/idle_fraction/<pool>` of every pool, of one step."""
    seconds = math.fsum(section.seconds_within(span) for span in section.critical_path())
    idle = {f"perf/idle_fraction/{pool}": last(fraction) for pool, fraction in section.idle_fractions().items()}
    return {"perf/critical_path_seconds": last(seconds), **idle}


_GIB = 2.0**30
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024
_STATUS = Path("/proc/self/status")


def memory_metrics() -> Metrics:
    """`perf/*_gb`, in units of 2^30 bytes under verl's names; device memory only if CUDA is already in use."""
    return {
        "perf/cpu_memory_used_gb": maximum(psutil.virtual_memory().used / _GIB),
        "perf/process_memory_gb": maximum(psutil.Process().memory_info().rss / _GIB),
        "perf/process_memory_peak_gb": maximum(_peak_resident_bytes() / _GIB),
        **_device_memory(),
    }


def peak_memory_bytes(device: str) -> int:
    """The most memory that this process has taken: of its GPU, with what others take there now, or on a CPU."""
    torch = sys.modules.get("torch")
    if device == "cpu" or torch is None or not torch.cuda.is_initialized():
        return _peak_resident_bytes()
    free, total = torch.cuda.mem_get_info()
    outside = max(0, total - free - torch.cuda.memory_reserved())
    return torch.cuda.max_memory_reserved() + outside


def _peak_resident_bytes() -> int:
    """On Linux since the program began; `ru_maxrss` there includes the peak of the process that started this one."""
    try:
        status = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) << 10 if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES


def _device_memory() -> Metrics:
    """Looks torch up among the loaded modules, so that it neither imports it nor creates a CUDA context."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "perf/max_memory_allocated_gb": maximum(torch.cuda.max_memory_allocated() / _GIB),
        "perf/max_memory_reserved_gb": maximum(torch.cuda.max_memory_reserved() / _GIB),
    }
