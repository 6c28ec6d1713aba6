"""The recorded runs of `benchmarks/asynchrony.py` against their goals, and against the virtual clock."""

from dataclasses import replace
from statistics import mean

import pytest

from benchmarks.asynchrony import MODES, PARTIAL, POOLS, SYNCHRONOUS, Line, goals, lines, predicted

SEEDS = {"tail": {0, 1, 2}, "turns": {0}, "task": {0, 1, 2}}
MOST_IDLE_ERROR = 0.1


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, int], Line]:
    recorded = lines()
    for name, seeds in SEEDS.items():
        for mode in MODES:
            assert {seed for each, own, seed in recorded if (each, own) == (name, mode)} >= seeds, (name, mode)
    return recorded


def test_t8_runs_on_older_samples_learn_as_well_as_synchronous_ones(found):
    reached = dict(goals("task", found))
    assert len(reached) == len(MODES) - 1 and all(reached.values()), reached


@pytest.mark.parametrize(("name", "number"), [("tail", 2), ("turns", 1)])
def test_t9_partial_rollouts_are_as_much_faster_as_the_goals_say(found, name, number):
    reached = dict(goals(name, found))
    assert len(reached) == number and all(reached.values()), reached


@pytest.mark.parametrize("name", [*SEEDS])
def test_t9_pools_of_synchronous_runs_are_idle_as_long_as_on_the_virtual_clock(found, name):
    own = [line for (each, mode, _), line in found.items() if (each, mode) == (name, SYNCHRONOUS)]
    for pool in POOLS:
        measured = mean(mean(line.times[f"perf/idle_fraction/{pool}"]) for line in own)
        assert measured == pytest.approx(
            mean(predicted(line, SYNCHRONOUS).idle[pool] for line in own), abs=MOST_IDLE_ERROR
        )


def test_records_of_runs_that_are_slower_or_learn_less_do_not_reach_the_goals(found):
    def worse(line: Line) -> Line:
        times = {name: [2.0 * value for value in values] for name, values in line.times.items()}
        return replace(line, times=times, score=None if line.score is None else line.score - 0.05)

    wrong = {key: worse(line) if key[1] == PARTIAL else line for key, line in found.items()}
    assert [is_reached for name in SEEDS for _, is_reached in goals(name, wrong)] == [False, False, False, True, False]
