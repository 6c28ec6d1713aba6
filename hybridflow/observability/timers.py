"""How long each stage of a step took."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from codetiming import Timer

from hybridflow.observability.metrics import Metrics, total


class StageTimers:
    """Seconds a stage since the last `reset`; stages may nest, and a stage entered twice adds up.

        timers.reset()
        with timers.stage("step"):
            with timers.stage("gen"):
                ...
        timers.metrics()  # timing_s/gen, timing_s/step

    `on_stage` is called with the stage that begins, and the enclosing one (or None) when it ends.
    """

    def __init__(self, on_stage: Callable[[str | None], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._on_stage = on_stage

    def reset(self) -> None:
        """Forget what was measured, as at the start of a step."""
        self._seconds.clear()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure the block as part of stage `name`, also when it raises."""
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

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere, such as in a worker."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """What stage `name` has taken so far; 0 when it never ran."""
        return self._seconds.get(name, 0.0)

    def metrics(self) -> Metrics:
        """`timing_s/<stage>` for every stage that has ended."""
        return {f"timing_s/{name}": total(seconds) for name, seconds in self._seconds.items()}

    def _tell(self) -> None:
        if self._on_stage is not None:
            self._on_stage(self._running[-1] if self._running else None)
