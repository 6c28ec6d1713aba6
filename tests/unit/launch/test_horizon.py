"""Where a run's steps go beyond the schedules of its learning rates."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.horizon import check_horizon

SHORT = [
    "trainer.total_steps=6",
    "actor.optimizer={schedule: linear, schedule_steps: 4}",
    "critic.optimizer={schedule: cosine, schedule_steps: 3}",
]


def test_all_roles_whose_schedule_ends_before_the_run_are_named():
    config = compose_run(SHORT, config_name="ppo").config
    with pytest.raises(ConfigError) as caught:
        check_horizon(config, ["actor", "critic"])
    for key, steps in (("actor", 4), ("critic", 3)):
        assert f"trainer.total_steps=6 goes beyond {key}.optimizer.schedule_steps={steps}" in caught.value.message
        assert f"Set {key}.optimizer.schedule_steps=6" in caught.value.remedy
    with pytest.raises(ConfigError) as caught:
        check_horizon(config, ["actor"])
    assert "critic" not in caught.value.message
