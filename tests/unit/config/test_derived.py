"""Numbers that follow from the configuration."""

from pathlib import Path

import pytest

from hybridflow.config.data import Data
from hybridflow.config.derived import (
    divisors,
    minibatch_prompts,
    optimizer_steps_per_step,
    pool_of,
    run_dir,
    total_optimizer_steps,
    training_mesh,
    training_of,
)
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Trainer
from hybridflow.config.placement import Parallelism, Pool
from hybridflow.config.roles import Role
from hybridflow.config.training import Training, TrainingEngine
from tests.unit.config.experiments import experiment

TWO_POOLS = {"placement.pools": {"a": Pool(devices=2), "b": Pool(devices=2)}, "trainer.devices": 4}
MEGATRON = {"trainer.devices": 4, "actor.engine": TrainingEngine.megatron}


def test_optimizer_steps_count_minibatches_and_epochs():
    config = Experiment(data=Data(batch_size=64), trainer=Trainer(total_steps=10))
    training = Training(minibatch_size=16, epochs=3)
    assert optimizer_steps_per_step(config, training) == 12
    assert total_optimizer_steps(config, training) == 120
    assert minibatch_prompts(config, Training()) == 64, "without a size, the whole batch is one"
    assert optimizer_steps_per_step(config, Training()) == 1


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (9, [1, 3, 9]), (5, [1, 5])])
def test_divisors(number, expected):
    assert divisors(number) == expected


def test_the_run_directory_follows_from_the_experiment_unless_it_is_given():
    assert run_dir(Experiment(trainer=Trainer(experiment="sums"))) == Path("runs/sums").absolute()
    assert run_dir(Experiment(trainer=Trainer(run_dir="/elsewhere"))) == Path("/elsewhere")
    assert run_dir(Experiment(trainer=Trainer(run_dir="~/mine"))) == Path.home() / "mine"


def test_a_role_is_single_on_one_device_and_in_shards_on_several():
    assert training_of(experiment({}), "actor").engine is TrainingEngine.single
    assert training_of(experiment({"trainer.devices": 2}), "actor").engine is TrainingEngine.fsdp
    assert training_of(experiment({"trainer.nodes": 2}), "actor").engine is TrainingEngine.fsdp


@pytest.mark.parametrize(
    ("settings", "role", "engine", "tensor"),
    [
        ({}, "critic", TrainingEngine.megatron, 2),
        ({"critic.engine": TrainingEngine.fsdp}, "critic", TrainingEngine.fsdp, 1),
        ({"roles": {"second": Role(parallelism=Parallelism(tensor=4))}}, "second", TrainingEngine.fsdp, 4),
    ],
)
def test_the_critic_is_laid_out_as_the_actor_and_other_roles_as_they_say(settings, role, engine, tensor):
    training = training_of(experiment({**MEGATRON, "actor.parallelism.tensor": 2, **settings}), role)
    assert (training.engine, training.parallelism.tensor) == (engine, tensor)


def test_the_rollout_is_where_the_actor_is_unless_it_is_placed():
    config = experiment({**TWO_POOLS, "placement.roles": {"actor": "b"}})
    assert [pool_of(config, role) for role in ("actor", "rollout", "critic")] == ["b", "b", "a"]
    config = experiment({**TWO_POOLS, "placement.roles": {"rollout": "b"}})
    assert pool_of(config, "rollout") == "b"


def test_what_other_axes_leave_divides_the_data():
    mesh = training_mesh(Parallelism(tensor=2, pipeline=2), 16)
    assert list(mesh.items()) == [("data", 4), ("pipeline", 2), ("sequence", 1), ("tensor", 2)]
