"""When a run takes more devices, and what it does with fewer."""

from collections.abc import Sequence

import pytest

from hybridflow.config.elastic import Elastic
from hybridflow.elastic import devices
from hybridflow.elastic.devices import ElasticDevices
from hybridflow.errors import ConfigError, ResourceError


class Clock:
    """Time that passes when the code sleeps, and a cluster whose nodes change with it."""

    def __init__(self, *nodes: tuple[float, Sequence[int]]) -> None:
        self.now, self.looks = 0.0, 0
        self._nodes = nodes

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self) -> Sequence[int]:
        self.looks += 1
        return [counts for at, counts in self._nodes if at <= self.now][-1]


def elastic(monkeypatch, clock: Clock, plan_on=sum, *, most: int | None = None, **bounds) -> ElasticDevices[int]:
    """A run on 4 devices; a plan is the number of devices that it uses."""
    monkeypatch.setattr(devices, "time", clock)
    settings = Elastic(**{"min_devices": 2, "grow_after_seconds": 100.0} | bounds)
    return ElasticDevices(
        settings, used=4, most=most, look=clock.look, plan_on=plan_on, size_of=int, patience_seconds=60.0
    )


def never() -> bool:
    return False


def test_a_run_grows_only_some_time_after_its_last_plan(monkeypatch):
    clock = Clock((0, [4, 4]))
    run = elastic(monkeypatch, clock)
    assert not run.grows()
    clock.now = 99.0
    assert not run.grows() and clock.looks == 0
    clock.now = 100.0
    assert run.grows() and run.plan == 8


def test_a_run_looks_for_devices_every_few_seconds(monkeypatch):
    clock = Clock((0, [4]))
    run = elastic(monkeypatch, clock, grow_after_seconds=0.0)
    for clock.now in (0.0, 1.0, 4.9, 5.0, 6.0):
        assert not run.grows()
    assert clock.looks == 2


@pytest.mark.parametrize("refused", [False, True])
def test_devices_that_no_plan_uses_are_planned_for_once(monkeypatch, refused):
    asked = []

    def plan_on(counts: Sequence[int]) -> int:
        asked.append(list(counts))
        if refused:
            raise ConfigError("The batch cannot be divided.", remedy="")
        return 4

    clock = Clock((0, [4, 1]), (50, [4, 4]))
    run = elastic(monkeypatch, clock, plan_on, grow_after_seconds=0.0)
    for clock.now in (0.0, 10.0, 20.0, 50.0):
        assert not run.grows()
    assert asked == [[4, 1], [4, 4]]


def test_a_run_takes_no_more_devices_than_it_may(monkeypatch):
    clock = Clock((0, [4, 4, 2]))
    run = elastic(monkeypatch, clock, list, most=6, grow_after_seconds=0.0)
    monkeypatch.setattr(run, "_size_of", sum)
    assert run.grows() and run.plan == [4, 2]
    assert not elastic(monkeypatch, clock, most=4, grow_after_seconds=0.0).grows()


def test_a_run_that_is_not_elastic_never_looks(monkeypatch):
    clock = Clock((0, [8]))
    assert not elastic(monkeypatch, clock, min_devices=None, grow_after_seconds=0.0).grows()
    assert clock.looks == 0


def test_a_run_continues_on_the_devices_that_are_left(monkeypatch):
    run = elastic(monkeypatch, Clock((0, [2, 1])))
    run.shrink(never)
    assert run.plan == 3


def test_below_its_bound_a_run_waits_for_devices(monkeypatch):
    clock = Clock((0, [1]), (30, [1, 2]))
    run = elastic(monkeypatch, clock)
    run.shrink(never)
    assert run.plan == 3 and clock.now == 30.0


def test_a_run_ends_if_too_few_devices_come(monkeypatch):
    with pytest.raises(ResourceError, match="only 1 of 4 devices left, and trainer.elastic.min_devices=2") as ended:
        elastic(monkeypatch, Clock((0, [1]))).shrink(never)
    assert "lower trainer.elastic.min_devices" in ended.value.remedy


def test_a_run_that_waits_for_devices_ends_when_it_is_asked_to(monkeypatch):
    clock = Clock((0, [1]))
    with pytest.raises(KeyboardInterrupt):
        elastic(monkeypatch, clock).shrink(lambda: clock.now >= 3.0)
    assert clock.now == 3.0
