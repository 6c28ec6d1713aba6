"""After composition nothing changes any more."""

import copy
import pickle
from dataclasses import replace

import pytest

from hybridflow.config.experiment import Experiment
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role
from hybridflow.config.section import sealed
from hybridflow.errors import ConfigError


@pytest.fixture
def config() -> Experiment:
    config = Experiment(roles={"judge": Role()})
    config.placement.pools["main"] = Pool()
    return sealed(config)


def test_no_section_can_be_assigned_to(config):
    role, pool = config.roles["judge"], config.placement.pools["main"]
    for section, name in (
        (config, "dataflow"),
        (config.actor.optimizer, "beta1"),
        (role.model, "path"),
        (pool, "devices"),
    ):
        before = vars(section)[name]
        with pytest.raises(ConfigError, match=rf"frozen: {type(section).__name__}\.{name}.*command line"):
            setattr(section, name, None)
        assert vars(section)[name] == before


def test_a_changed_copy_can_be_made(config):
    shorter = replace(config.trainer, total_steps=3)
    shorter.total_steps = 4
    assert (config.trainer.total_steps, shorter.total_steps) == (150, 4)


def test_the_seal_survives_the_way_to_another_process(config):
    for travelled in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert travelled == config
        with pytest.raises(ConfigError, match="frozen"):
            travelled.trainer.seed = 1
