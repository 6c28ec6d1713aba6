"""The learning rate at each optimizer step."""

import pytest

from hybridflow.config.training import Optimizer, Schedule
from hybridflow.engines.training.optimizer import learning_rate


def rates(steps: int, **settings) -> list[float]:
    optimizer = Optimizer(learning_rate=1.0, **settings)
    return [learning_rate(step, optimizer=optimizer, total_steps=steps) for step in range(steps + 1)]


def test_a_constant_rate_stays_after_the_warm_up():
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_rate_falls_to_zero_after_the_last_step():
    assert rates(4, schedule=Schedule.linear) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_cosine_rate_is_half_way_down_in_the_middle():
    assert rates(4, schedule=Schedule.cosine) == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)


def test_the_peak_is_reached_with_the_last_step_of_the_warm_up():
    assert rates(4, warmup_steps=2, schedule=Schedule.linear) == [0.5, 1.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine])
def test_the_rate_is_never_negative_beyond_the_end(schedule):
    assert learning_rate(99, optimizer=Optimizer(schedule=schedule), total_steps=10) == pytest.approx(0.0)


def test_a_warm_up_longer_than_the_run_only_rises():
    assert rates(3, warmup_steps=10, schedule=Schedule.cosine) == pytest.approx([0.1, 0.2, 0.3, 0.4])
