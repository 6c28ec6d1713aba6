"""Which reward functions run in processes of their own by default: those that may be slow, on Ray."""

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.automatic import plan_fully
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.start_roles import resource_pools
from tests.unit.launch.plans import planned

RAY = "trainer.backend=ray"
SLOW = "reward.functions=[exact_match,code_tests]"
SERVER = "reward.functions=['http://localhost:1/score']"
ONE_PASS = ["actor.minibatch_size=null", "actor.epochs=1"]
"""The update then takes the old log-probabilities from its own forward pass: every call needs the scores."""


def pool_of_rewards(plan: RunPlan) -> str:
    return next(role.pool for role in plan.roles if role.name == "reward")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([RAY, SLOW], "cpus"),
        ([RAY, "reward.functions=[math]"], "cpus"),
        ([RAY, SERVER], "cpus"),
        (["trainer.devices=2", SLOW], "cpus"),
        ([RAY, SLOW, "trainer.parallelism=auto"], "cpus"),
        ([RAY, SLOW, "algorithm=grpo"], "cpus"),
        ([RAY, SLOW, "algorithm=grpo", *ONE_PASS], "main"),
        ([RAY, SLOW, "algorithm=grpo", *ONE_PASS, "algorithm.kl={placement: loss, coefficient: 0.1}"], "cpus"),
        ([RAY, SLOW, "algorithm=grpo", *ONE_PASS, "asynchrony.partial_rollouts=true"], "cpus"),
        ([RAY, "reward.functions=[exact_match,length]"], "main"),
        ([RAY, SLOW, "placement.roles.reward=main"], "main"),
        ([RAY, "placement.roles.reward=cpus"], "cpus"),
        ([RAY, SLOW, "reward.model.path=builtin:calculator"], "main"),
        ([SLOW], "main"),
        ([RAY, SLOW, "placement.pools.all.devices=1"], "all"),
        ([RAY, SLOW, "placement=colocated"], "main"),
    ],
)
def test_slow_reward_functions_have_a_pool_where_their_calls_overlap(words, expected):
    assert pool_of_rewards(planned(*words)) == expected


@pytest.mark.parametrize("devices", [1, 4])
def test_there_is_a_process_for_each_device_and_no_device_is_taken(devices):
    plan = planned(RAY, SLOW, f"trainer.devices={devices}")
    assert plan.pools == {"main": devices, "cpus": devices}
    pools = resource_pools(plan)
    assert (pools["cpus"].device, pools["cpus"].has_only_functions) == ("cpu", True)
    assert not pools["main"].has_only_functions
    assert plan.composed.origins["placement.roles.reward"] == "device"


def test_a_pool_that_also_has_a_model_takes_devices():
    plan = planned(RAY, SLOW, "placement.roles={critic: cpus}")
    assert pool_of_rewards(plan) == "main"
    assert not resource_pools(plan)["cpus"].has_only_functions


def test_a_further_role_of_slow_functions_has_its_calls_there_too():
    cost = "roles.cost={kind: reward_function, functions: [%s]}"
    plan = planned(RAY, "algorithm=safe_rlhf", cost % "math")
    assert {role.name: role.pool for role in plan.roles if role.reward} == {"reward": "main", "cost": "cpus"}
    plan = planned(RAY, "algorithm=safe_rlhf", cost % "math", "roles.cost.pool=main")
    assert {role.pool for role in plan.roles} == {"main"}


def test_layouts_are_planned_for_the_devices_without_the_processes_of_functions():
    plan = plan_fully(compose_run([RAY, SLOW, "trainer.parallelism=auto", "trainer.devices=2"], config_name="ppo"))
    assert plan.pools == {"main": 2, "cpus": 2} and pool_of_rewards(plan) == "cpus"


def test_a_pool_that_there_is_not_is_named_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"placement\.roles\.reward=gpus: there is no such pool") as caught:
        planned("placement.roles.reward=gpus")
    assert (
        caught.value.remedy
        == "Use main or cpus, or add the pool with placement.pools.gpus.devices=1; then define all pools of the run."
    )
