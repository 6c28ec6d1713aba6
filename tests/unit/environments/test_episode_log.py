"""Messages about episodes."""

import logging

import pytest

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episode_log import EpisodeLog
from hybridflow.errors import EpisodeError


def test_the_more_episodes_have_failed_the_fewer_are_logged(caplog):
    caplog.set_level(logging.WARNING)
    log = EpisodeLog(EnvironmentSettings(name="frozen_lake", error_budget=250), max_response_tokens=8)
    for uid in range(250):
        log.failure((uid, 0), 1, "it fell.")
    numbers = [int(record.getMessage().split("failures=")[1].split()[0]) for record in caplog.records]
    assert numbers == [*range(1, 10), *range(10, 100, 10), 100, 200]
    with pytest.raises(EpisodeError, match="Failed episodes of this rank so far: 251"):
        log.failure((250, 0), 1, "it fell.")
