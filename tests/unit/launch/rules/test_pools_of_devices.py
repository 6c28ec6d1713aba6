"""Pools with devices of their own: what is counted, the defaults of their roles, and what is refused."""

import pytest

from hybridflow.config.model import Dtype
from hybridflow.config.rollout import RolloutKind
from hybridflow.errors import ConfigError, Problems
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.dry_run import role_rows
from hybridflow.launch.plan.defaults import resolved
from hybridflow.launch.rules.memory import memory_phases, phase_problems
from hybridflow.launch.rules.parallelism import parallelism_problems
from hybridflow.launch.rules.resources import pool_problems
from hybridflow.launch.start_roles import resource_pools
from tests.unit.launch.plans import judged, planned

CPUS = "placement.pools={main: {devices: 2}, cpus: {devices: 3, device: cpu}}"
TWO = ["trainer.devices=2", CPUS]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pool_of_cpus_comes_in_addition_to_the_devices_of_the_run(device):
    plan = planned("algorithm=grpo", *TWO, "placement.roles={reward: cpus}", device=device)
    assert not judged(plan, pool_problems)
    pools = resource_pools(plan)
    assert [(name, pool.devices, pool.device) for name, pool in pools.items()] == [
        ("main", 2, device),
        ("cpus", 3, "cpu"),
    ]
    rows = {row["role"]: (row["pool"], row["devices"]) for row in role_rows(plan)}
    assert (rows["actor"], rows["reward"]) == (("main", "2"), ("cpus", "3 (cpu)"))


def test_the_resource_of_a_pool_is_shown_and_reserved():
    pools = "placement.pools={main: {devices: 2, resource: 'accelerator_type:H100'}, rest: {devices: 1}}"
    plan = planned("algorithm=grpo", "trainer.devices=3", pools, "placement.roles={reward: rest}")
    assert [pool.resource for pool in resource_pools(plan).values()] == ["accelerator_type:H100", None]
    assert role_rows(plan)[0]["devices"] == "2 (accelerator_type:H100)"


def test_models_in_a_pool_of_cpus_have_the_defaults_of_cpus():
    roles = "placement.roles={critic: cpus, reward: cpus}"
    config = resolved(
        compose_run([*TWO, roles, "critic.model.path=a", "reward.model.path=b"], config_name="ppo").config, "cuda"
    )
    assert (config.critic.model.dtype, config.critic.gradient_checkpointing) == (Dtype.float32, False)
    assert config.reward.model.dtype is Dtype.float32
    assert (config.actor.model.dtype, config.actor.gradient_checkpointing) == (Dtype.bfloat16, True)
    config = resolved(compose_run([*TWO, "placement.roles={rollout: cpus}"], config_name="ppo").config, "cuda")
    assert (config.rollout.engine, config.rollout.sleep) == (RolloutKind.transformers, False)


def test_the_memory_of_a_pool_of_cpus_is_not_that_of_the_gpus(caplog):
    plan = planned(*TWO, "placement.roles={critic: cpus}", device="cuda")
    assert memory_phases(plan, "cpus", device_bytes=None)
    caplog.set_level("INFO")
    assert not [*phase_problems(plan, None)]
    assert "pool 'main'" in caplog.text and "pool 'cpus'" not in caplog.text


@pytest.mark.parametrize(
    ("words", "device", "message", "remedy"),
    [
        (
            [CPUS, "placement.roles={rollout: cpus}"],
            "cuda",
            "weights are sent only between",
            "placement.roles.rollout=main",
        ),
        (
            ["placement.pools={main: {devices: 2, device: cuda}}"],
            "cpu",
            "the run's devices are CPUs",
            "trainer.device=cuda",
        ),
    ],
)
def test_devices_that_a_role_cannot_use(words, device, message, remedy):
    with pytest.raises(ConfigError, match=message) as caught:
        judged(planned("algorithm=grpo", "trainer.devices=2", *words, device=device), pool_problems)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("pools", "role", "message", "remedy"),
    [
        (
            "{main: {devices: 1}, cpus: {devices: 2, device: cpu}}",
            "critic",
            "cannot exchange tensors",
            "cpus.devices=1",
        ),
        ("{main: {devices: 1, resource: fast}}", "", "is a resource of Ray", "trainer.backend=ray"),
    ],
)
def test_pools_that_the_local_backend_cannot_have(pools, role, message, remedy):
    roles = [f"placement.roles={{{role}: cpus}}"] if role else []
    with pytest.raises(ConfigError, match=message) as caught:
        judged(planned("trainer.backend=local", f"placement.pools={pools}", *roles), pool_problems)
    assert remedy in caught.value.remedy


def test_the_local_backend_runs_functions_on_any_number_of_cpus():
    config = compose_run(
        ["trainer.backend=local", "placement.pools={main: {devices: 1}, cpus: {devices: 4, device: cpu}}"],
        config_name="ppo",
    ).config
    assert not [*parallelism_problems(config)]


def test_a_run_needs_a_pool_of_its_own_devices():
    problems = Problems(collects=True)
    compose_run(["placement.pools={cpus: {devices: 1, device: cpu}}"], config_name="ppo", problems=problems)
    (error,) = problems.found
    assert "The pools use 0 devices, but the run has 1 (device: cpu is in addition to them)" in error.message
    assert "Leave out device=cpu" in str(error.remedy)
