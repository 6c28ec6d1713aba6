"""Layouts that cannot be are refused in the words of the command line, before anything starts."""

import pytest

from hybridflow.config.loop import BackendKind
from hybridflow.config.placement import ParallelismKind, PlacementKind, Pool
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.ppo import PPO
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.rules.layouts import critic_layout_problems
from hybridflow.launch.rules.parallelism import parallelism_problems
from tests.unit.config.experiments import experiment

TWO_POOLS = {"placement.pools": {"a": Pool(devices=2), "b": Pool(devices=2)}, "trainer.devices": 4}
POOLS_3_1 = {"placement.pools": {"a": Pool(devices=3), "b": Pool(devices=1)}}
MEGATRON = {"trainer.devices": 4, "actor.engine": TrainingEngine.megatron}
VLLM = {"rollout.engine": RolloutKind.vllm}
LOCAL = {"trainer.backend": BackendKind.local}

REFUSED = [
    ({"trainer.devices": 2, "actor.engine": TrainingEngine.single}, "Pool 'main' has 2 devices", "actor.engine=fsdp"),
    ({**TWO_POOLS, **LOCAL}, "trainer.backend=local has one process", "trainer.backend=ray"),
    ({"trainer.devices": 2, **LOCAL}, "the run has 2 devices", "trainer.backend=ray"),
    (
        {**MEGATRON, "actor.parallelism.tensor": 3},
        "tensor=3: 3 does not divide the 4 devices of pool 'main'",
        "1, 2, 4",
    ),
    (
        {**MEGATRON, "actor.parallelism.tensor": 4, "actor.parallelism.pipeline": 2},
        "actor.parallelism.pipeline=2 actor.parallelism.tensor=4: 8 does not divide the 4 devices",
        "1, 2, 4",
    ),
    ({"trainer.devices": 2, "actor.parallelism.pipeline": 2}, "2, but actor.engine=fsdp", "actor.engine=megatron"),
    ({**MEGATRON, "actor.parallelism.sequence": 2}, "sequence=2, but actor.engine=megatron", "actor.engine=fsdp"),
    (
        {"actor.parallelism.tensor": 3},
        "actor.parallelism.tensor=3 needs 3 devices, but pool 'main' has 1",
        "Use trainer.devices=3 (with actor.engine=auto or fsdp or megatron), or remove actor.parallelism.tensor.",
    ),
    ({"actor.parallelism.expert": 4}, "expert=4 needs 4 devices", "trainer.devices=4 (with actor.engine=megatron)"),
    ({**MEGATRON, "actor.parallelism.virtual_pipeline": 2}, "pipeline=1 has one", "actor.parallelism.pipeline=2"),
    ({"trainer.devices": 4, "actor.parallelism.replicas": 3}, "3 does not divide the 4 data-parallel ranks", "1, 2, 4"),
    (
        {**MEGATRON, "actor.parallelism.expert": 4, "actor.parallelism.tensor": 2},
        "actor.parallelism.expert=4 does not divide the 2 data-parallel ranks",
        "1, 2",
    ),
    ({**MEGATRON, "actor.compile": True}, "actor.engine=megatron does not use", "actor.engine=single or fsdp"),
    (
        {"trainer.devices": 2, "actor.compile": True, "actor.parallelism.tensor": 2},
        "actor.parallelism.tensor=2: torch.compile does not",
        "actor.parallelism.tensor=1",
    ),
    ({**MEGATRON, "actor.lora.rank": 8}, "actor.engine=megatron trains no adapters", "actor.engine=single or fsdp"),
    (
        {"rollout.engine": RolloutKind.transformers, "rollout.parallelism.tensor": 2, "trainer.devices": 2},
        "rollout.parallelism.tensor=2, but rollout.engine=transformers",
        "rollout.engine=vllm",
    ),
    ({**VLLM, "rollout.parallelism.tensor": 3, "trainer.devices": 4}, "3 does not divide the 4 devices", "1, 2, 4"),
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
        STRICT.check([parallelism_problems], experiment(settings))
    assert message in caught.value.message
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        ({"trainer.devices": 2, "actor.engine": TrainingEngine.single}, ["but actor.engine=single"]),
        ({**MEGATRON, "actor.parallelism.tensor": 3}, ["actor.parallelism.tensor=3: 3 does not"]),
        ({"actor.parallelism.tensor": 3}, ["actor.parallelism.tensor=3 needs 3 devices"]),
        ({**MEGATRON, "critic.lora.rank": 8}, ["critic.lora.rank=8, but actor.engine=megatron"]),
        (
            {**MEGATRON, **POOLS_3_1, "placement.roles": {"critic": "b"}, "actor.parallelism.tensor": 3},
            ["The critic takes the actor's layout: actor.parallelism.tensor=3 needs 3 devices, but pool"],
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_layout_that_the_critic_takes_from_the_actor_is_told_once(settings, messages):
    config, problems = experiment(settings), Problems(collects=True)
    problems.check([parallelism_problems], config)
    problems.check([critic_layout_problems], config, PPO)
    for error, message in zip(problems.found, messages, strict=True):
        assert message in error.message


@pytest.mark.parametrize("settings", FINE, ids=[", ".join(settings) for settings in FINE])
def test_a_layout_that_can_be_passes(settings):
    STRICT.check([parallelism_problems], experiment(settings))


PLANNED = [
    {"placement.kind": PlacementKind.auto, "trainer.devices": 3, "rollout.parallelism.tensor": 2, **VLLM},
    {"placement.kind": PlacementKind.auto, "trainer.devices": 4, "actor.parallelism.pipeline": 2},
    {"placement.kind": PlacementKind.split, "trainer.devices": 4, "critic.engine": TrainingEngine.single},
    {"trainer.devices": 3, "actor.parallelism.kind": ParallelismKind.auto, "actor.parallelism.tensor": 2},
    {"trainer.devices": 0, "actor.parallelism.tensor": 2},
]


@pytest.mark.parametrize("settings", PLANNED, ids=[", ".join(settings) for settings in PLANNED])
def test_a_layout_that_hybridflow_is_to_choose_is_not_refused_before(settings):
    STRICT.check([parallelism_problems], experiment(settings))
    STRICT.check([critic_layout_problems], experiment(settings), PPO)
    decided = {"placement.kind": PlacementKind.given, "actor.parallelism.kind": ParallelismKind.given}
    found, devices = Problems(collects=True), {"trainer.devices": settings["trainer.devices"] or 3}
    found.check([parallelism_problems], experiment(settings | decided | devices))
    found.check([critic_layout_problems], experiment(settings | decided | devices), PPO)
    assert found.found, "the same layout is an error where nothing is planned"
