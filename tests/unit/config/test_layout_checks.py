"""Layouts that cannot be are refused in the words of the command line, before anything starts."""

import pytest

from hybridflow.config.checks import check
from hybridflow.config.derived import pool_of, training_mesh, training_of
from hybridflow.config.loop import BackendKind
from hybridflow.config.placement import Parallelism, Pool
from hybridflow.config.roles import Role
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.errors import ConfigError
from tests.unit.config.test_checks import experiment

TWO_POOLS = {"placement.pools": {"a": Pool(devices=2), "b": Pool(devices=2)}, "trainer.devices": 4}
MEGATRON = {"trainer.devices": 4, "actor.engine": TrainingEngine.megatron}
VLLM = {"rollout.engine": RolloutKind.vllm}

REFUSED = [
    (
        {"placement.pools": {"a": Pool(devices=0), "b": Pool(devices=1)}},
        "placement.pools.a.devices=0 is too small",
        "Use 1 or more",
    ),
    (
        {"trainer.devices": 2, "actor.engine": TrainingEngine.single},
        "Pool 'main' has 2 devices, and actor.engine=single",
        "actor.engine=fsdp",
    ),
    (
        {**TWO_POOLS, "trainer.backend": BackendKind.local},
        "trainer.backend=local has one process",
        "trainer.backend=ray",
    ),
    ({"trainer.devices": 2, "trainer.backend": BackendKind.local}, "the run has 2 devices", "trainer.backend=ray"),
    (
        {**MEGATRON, "actor.parallelism.tensor": 3},
        "actor.parallelism.tensor=3: 3 does not divide the 4 devices of pool 'main'",
        "1, 2, 4",
    ),
    (
        {**MEGATRON, "actor.parallelism.tensor": 4, "actor.parallelism.pipeline": 2},
        "actor.parallelism.pipeline=2 actor.parallelism.tensor=4: 8 does not divide the 4 devices",
        "1, 2, 4",
    ),
    ({**MEGATRON, "actor.parallelism.tensor": 0}, "actor.parallelism.tensor=0 is too small", "Use 1 or more"),
    (
        {"trainer.devices": 2, "actor.parallelism.pipeline": 2},
        "actor.parallelism.pipeline=2, but actor.engine=fsdp",
        "actor.engine=megatron",
    ),
    (
        {**MEGATRON, "actor.parallelism.sequence": 2},
        "actor.parallelism.sequence=2, but actor.engine=megatron",
        "actor.engine=fsdp",
    ),
    (
        {"actor.parallelism.tensor": 2},
        "actor.parallelism.tensor=2, but actor.engine=single",
        "fsdp or megatron",
    ),
    (
        {**MEGATRON, "actor.parallelism.virtual_pipeline": 2},
        "actor.parallelism.pipeline=1 has one",
        "actor.parallelism.pipeline=2",
    ),
    (
        {"trainer.devices": 4, "actor.parallelism.replicas": 3},
        "actor.parallelism.replicas=3 does not divide the 4 data-parallel ranks",
        "1, 2, 4",
    ),
    (
        {**MEGATRON, "actor.parallelism.expert": 4, "actor.parallelism.tensor": 2},
        "actor.parallelism.expert=4 does not divide the 2 data-parallel ranks",
        "1, 2",
    ),
    ({**MEGATRON, "actor.lora.rank": 8}, "actor.engine=megatron trains no adapters", "actor.engine=fsdp"),
    (
        {"rollout.engine": RolloutKind.transformers, "rollout.parallelism.tensor": 2, "trainer.devices": 2},
        "rollout.parallelism.tensor=2, but rollout.engine=transformers",
        "rollout.engine=vllm",
    ),
    (
        {**VLLM, "rollout.parallelism.tensor": 3, "trainer.devices": 4},
        "3 does not divide the 4 devices of pool 'main'",
        "1, 2, 4",
    ),
    ({"rollout.transfer.bucket_mb": 0}, "rollout.transfer.bucket_mb=0 is too small", "Use 1"),
    ({"rollout.transfer.timeout_seconds": 0.0}, "rollout.transfer.timeout_seconds=0 is too small", "Use 300"),
]
FINE = [
    {"trainer.devices": 2},
    {
        **MEGATRON,
        "actor.parallelism.tensor": 2,
        "actor.parallelism.pipeline": 2,
        **VLLM,
        "rollout.parallelism.tensor": 2,
    },
    {**TWO_POOLS, "placement.roles": {"rollout": "b", "critic": "b"}},
    {"trainer.devices": 4, "actor.parallelism.sequence": 2, "actor.parallelism.replicas": 2},
]


@pytest.mark.parametrize(("settings", "message", "remedy"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_a_layout_that_cannot_be_is_explained(settings, message, remedy):
    with pytest.raises(ConfigError) as caught:
        check(experiment(settings))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("settings", FINE, ids=[", ".join(settings) for settings in FINE])
def test_a_layout_that_can_be_passes(settings):
    check(experiment(settings))


def test_a_role_is_single_on_one_device_and_in_shards_on_several():
    assert training_of(experiment({}), "actor").engine is TrainingEngine.single
    assert training_of(experiment({"trainer.devices": 2}), "actor").engine is TrainingEngine.fsdp


def test_the_critic_is_laid_out_as_the_actor_unless_it_names_an_engine():
    config = experiment({**MEGATRON, "actor.parallelism.tensor": 2})
    critic = training_of(config, "critic")
    assert (critic.engine, critic.parallelism.tensor) == (TrainingEngine.megatron, 2)
    config = experiment({**MEGATRON, "actor.parallelism.tensor": 2, "critic.engine": TrainingEngine.fsdp})
    critic = training_of(config, "critic")
    assert (critic.engine, critic.parallelism.tensor) == (TrainingEngine.fsdp, 1)


def test_a_role_of_the_users_own_has_its_own_layout():
    role = Role(engine=TrainingEngine.megatron, parallelism=Parallelism(tensor=2))
    config = experiment({"trainer.devices": 2, "roles": {"second": role}})
    assert training_of(config, "second").parallelism.tensor == 2


def test_the_rollout_is_where_the_actor_is_unless_it_is_placed():
    config = experiment({**TWO_POOLS, "placement.roles": {"actor": "b"}})
    assert [pool_of(config, role) for role in ("actor", "rollout", "critic")] == ["b", "b", "a"]
    config = experiment({**TWO_POOLS, "placement.roles": {"rollout": "b"}})
    assert pool_of(config, "rollout") == "b"


def test_what_other_axes_leave_divides_the_data():
    mesh = training_mesh(Parallelism(tensor=2, pipeline=2), 16)
    assert list(mesh.items()) == [("data", 4), ("pipeline", 2), ("sequence", 1), ("tensor", 2)]
