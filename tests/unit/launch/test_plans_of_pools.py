"""Plans of given pools with different devices."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.automatic import with_plan
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.planning import plan_on
from hybridflow.mapping.explanation import step_facts
from hybridflow.mapping.explanation_text import text_of
from hybridflow.mapping.given_step import given_step

POOLS = "placement.pools={training: {devices: 4}, values: {devices: 2}, cpus: {devices: 3, device: cpu}}"
ROLES = "placement.roles={critic: values, reward: cpus}"
OFFLOADS = "actor.offload_optimizer=true"
WORDS = ["model.path=1B", "data.train_files=[data.jsonl]", "data.batch_size=64", "trainer.devices=6"]


def planned(on: str, *words: str):
    """The plan and the best step of a command line on some devices."""
    plan, found = plan_on(compose_run([*WORDS, *words], config_name="ppo"), on)
    return plan, found.plans[0]


def seconds(step, name: str) -> float:
    return next(call.seconds for call in step_facts(step).calls if call.name == name)


def test_each_pool_has_the_speed_and_the_memory_of_its_own_devices():
    _, alike = planned("6xH100", POOLS, ROLES)
    _, mixed = planned("4xH100,values=2xA100-80", POOLS, ROLES)
    _, small = planned("4xH100,values=2xRTX-4090", POOLS, ROLES)
    assert alike.pools == mixed.pools == small.pools
    assert seconds(alike, "actor.update") == pytest.approx(seconds(mixed, "actor.update"))
    assert seconds(alike, "critic.update") < seconds(mixed, "critic.update") < seconds(small, "critic.update")
    (phase,) = small.phases("values")
    assert phase.total < 24564 << 20
    assert {pool.name: pool.device for pool in step_facts(small).pools} == {"training": "H100", "values": "RTX-4090"}


def test_a_critic_on_cpus_is_planned_on_cpus_and_not_on_the_devices_of_the_run():
    pools = "placement.pools={training: {devices: 6}, cpus: {devices: 3, device: cpu}}"
    _, on_gpus = planned("6xH100", pools, "placement.roles={reward: cpus}", "model.path=builtin:calculator")
    _, on_cpus = planned("6xH100", pools, "placement.roles={critic: cpus}", "model.path=builtin:calculator")
    assert on_cpus.pools["cpus"] == (("critic",), 3)
    assert seconds(on_gpus, "critic.update") < seconds(on_cpus, "critic.update")
    assert on_gpus.plan.idle_devices == on_cpus.plan.idle_devices == 0


def test_a_step_of_given_layouts_has_the_idle_devices_and_the_host_memory_of_the_search():
    _, found = plan_on(compose_run([*WORDS, POOLS, ROLES, OFFLOADS], config_name="ppo"), "5xH100,values=2xA100-80")
    step = found.plans[0]
    given = given_step(step.request, step.layouts).plan
    assert given.idle_devices == step.plan.idle_devices
    host_bytes = [[option.host_bytes for option in pool.options.values()] for pool in given.pools]
    assert host_bytes == [[option.host_bytes for option in pool.options.values()] for pool in step.plan.pools]
    assert max(map(max, host_bytes)) > 0


def test_a_model_that_does_not_fit_on_the_devices_of_its_pool_is_refused():
    _, found = plan_on(compose_run([*WORDS, POOLS, ROLES, "model.path=7B"], config_name="ppo"), "4xH200,values=2xT4")
    assert not found.plans
    text = text_of(found)
    assert text.splitlines()[0].endswith(" on 4 x H200 and 2 x T4 (pool values)")
    assert "It does not fit." in text
    (critic,) = (line.split() for line in text.splitlines() if line.startswith("critic") and "updating" in line)
    assert "fits" not in critic


def test_the_kind_of_gpu_of_a_pool_is_that_of_its_resource():
    def pools(kind: str) -> str:
        return (
            f"placement.pools={{training: {{devices: 4}}, values: {{devices: 2, resource: 'accelerator_type:{kind}'}}}}"
        )

    roles = "placement.roles={critic: values}"
    _, found = planned("6xH100", pools("T4"), roles, "model.path=builtin:calculator")
    _, named = planned("4xH100,values=2xT4", pools("T4"), roles, "model.path=builtin:calculator")
    assert found.seconds == named.seconds
    _, same = planned("6xH100", pools("H100"), roles, "model.path=builtin:calculator")
    assert not same.request.pool_clusters
    with pytest.raises(ConfigError, match="the planner does not know which device this is") as caught:
        planned("6xH100", pools("TPU"), roles)
    assert "--on DEVICES,values=COUNTxDEVICE" in caught.value.remedy


def test_a_plan_keeps_the_pools_that_were_given():
    plan, step = planned("4xH100,values=2xA100-80", POOLS, ROLES, "trainer.parallelism=auto")
    placement = with_plan(plan, step).config.placement
    assert placement.pools == plan.config.placement.pools
    assert placement.roles == {"critic": "values", "reward": "cpus"}


@pytest.mark.parametrize(
    ("on", "message", "remedy"),
    [
        ("4xH100,value=2xT4", "names the pool 'value', which the run does not have", "Did you mean 'values'?"),
        ("4xH100,values=3xT4", "gives pool 'values' 3 devices", "the same number"),
        ("4xH100,values", "'values' does not name the devices of a pool", "POOL=DEVICES"),
    ],
)
def test_devices_of_pools_that_contradict_the_run(on, message, remedy):
    with pytest.raises(ConfigError, match=message) as caught:
        planned(on, POOLS, ROLES)
    assert remedy in caught.value.remedy
