"""The learning rate at each optimizer step."""

import pytest

from hybridflow.config.training import Optimizer, Schedule
from hybridflow.engines.training.optimizer import learning_rate


@pytest.mark.parametrize(
    ("steps", "settings", "expected"),
    [
        (5, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (4, {"schedule": Schedule.linear}, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (4, {"schedule": Schedule.cosine}, [1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0]),
        (4, {"warmup_steps": 2, "schedule": Schedule.linear}, [0.5, 1.0, 1.0, 0.5, 0.0]),
        (3, {"warmup_steps": 10, "schedule": Schedule.cosine}, [0.1, 0.2, 0.3, 0.4]),
    ],
    ids=["constant after the warm-up", "linear to zero", "cosine to zero", "peak ends the warm-up", "only a warm-up"],
)
def test_rates_from_the_first_step_to_beyond_the_last(steps, settings, expected):
    optimizer = Optimizer(learning_rate=1.0, **settings)
    rates = [learning_rate(step, optimizer=optimizer, total_steps=steps) for step in range(len(expected))]
    assert rates == pytest.approx(expected, abs=1e-6)
