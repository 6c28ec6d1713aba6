"""The devices on which a run is planned, and how many of them each of its roles can use."""

import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
import torch
import yaml

from hybridflow.errors import ConfigError
from hybridflow.launch.checked import checked_composition
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.planning import plan_on, request_on, run_file
from hybridflow.launch.prepare import checked_plan
from hybridflow.mapping.changes import faster
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.costs import StepCosts
from hybridflow.models.geometry import parameter_count

MODEL = ["model.path=1B", "data.train_files=[data.jsonl]"]


@pytest.fixture
def eight_gpus(monkeypatch):
    """A machine with eight GPUs; PyTorch's answers are the only stand-ins."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # earlier tests of the process may share a Ray
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=79 << 30))


def test_a_plan_without_devices_uses_all_of_this_machine(eight_gpus, caplog):
    with caplog.at_level(logging.INFO):
        plan, found = plan_on(compose_run(MODEL, config_name="ppo"), None)
    assert sum(pool.num_devices for pool in found.plans[0].plan.pools) + found.plans[0].plan.idle_devices == 8
    assert found.request.cluster.device.name == "H100"
    assert "GPUs named 'NVIDIA H100 80GB HBM3' are described as H100" in caplog.text
    saved = yaml.safe_load(run_file(plan, found.plans[0]))
    pools = [value for key, value in saved.items() if key.startswith("placement.pools.") and key.endswith(".devices")]
    assert saved["trainer.devices"] == sum(pools)


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["trainer.devices=2"], 2),
        (["trainer.devices=auto"], 8),
        (["trainer.devices=4", "placement.pools={a: {devices: 3}, b: {devices: 1}}", "placement.roles={actor: a}"], 4),
        (["placement.pools.a.devices=1"], 1),
        (["trainer.device=cpu"], 1),
    ],
)
def test_the_devices_that_the_user_sets_are_kept(eight_gpus, words, devices):
    _, request = request_on(compose_run([*MODEL, *words], config_name="ppo"), None)
    assert request.cluster.num_devices == devices


def test_trained_roles_divide_a_minibatch_and_all_others_the_batch():
    sizes = ["data.batch_size=32", "actor.minibatch_size=16", "critic.minibatch_size=16"]
    layout = [f"{section}.parallelism.{axis}=1" for section in ("actor", "critic") for axis in ("tensor", "pipeline")]
    words = [*sizes, *layout, "actor.engine=fsdp", "actor.parallelism.sequence=1", "rollout.parallelism.tensor=1"]
    composed = compose_run([*MODEL, *words, "algorithm.kl.placement=loss"], config_name="ppo")
    _, request = request_on(composed, cluster_of("64xH100"))
    costs = StepCosts(request)
    sizes = (16, 32, 64)
    options = {role: dict(zip(sizes, costs.options((role,), sizes), strict=True)) for role in request.roles}
    fit = {role: [size for size in sizes if options[role][size]] for role in request.roles}
    assert fit["actor"] == [16]
    assert fit["reference"] == fit["rollout"] == [16, 32]


@pytest.mark.parametrize(
    ("devices", "settings", "copies"),
    [
        (2, [], True),
        (2, ["trainer.snapshot_fraction=0"], False),
        (2, ["trainer.max_faults=0"], False),
        (1, [], False),  # no Ray, no copies
    ],
)
def test_copies_of_the_state_take_memory_of_processes_on_cpus(devices, settings, copies):
    for kind in ("CPU", "H100"):
        request = request_on(compose_run([*MODEL, *settings], config_name="ppo"), cluster_of(f"{devices}x{kind}"))[1]
        assert request.keeps_copies == copies
        more = replace(request, cluster=replace(request.cluster, num_devices=8))
        assert more.keeps_copies == (not any("snapshot" in word or "faults" in word for word in settings))


def test_copies_of_the_state_of_gpus_are_in_host_memory():
    with_copies, without = (
        plan_on(compose_run([*MODEL, f"trainer.snapshot_fraction={share}"], config_name="ppo"), "2xH100")[1].plans[0]
        for share in (0.02, 0)
    )
    assert with_copies.layouts == without.layouts
    assert with_copies.memory("actor").resident == without.memory("actor").resident
    assert without.memory("actor").host_bytes == 0
    parameters = parameter_count(with_copies.request.models[0].use.geometry)
    state = parameters / with_copies.pools["main"][1] * (2 + 12)
    assert with_copies.memory("actor").host_bytes == pytest.approx(2 * state, rel=0.01)


@pytest.mark.parametrize("kind", ["colocated", "split", "standalone"])
def test_a_kind_of_placement_leaves_layouts_to_the_planner(kind):
    _, found = plan_on(compose_run([*MODEL, f"placement={kind}", "model.path=70B"], config_name="ppo"), "64xH100")
    assert found.plans
    own = compose_run([*MODEL, f"placement={kind}", "trainer.parallelism=given", "model.path=70B"], config_name="ppo")
    assert not plan_on(own, "64xH100")[1].plans, "values that are given are kept: a rollout on one device is too large"


@pytest.mark.parametrize(
    ("prompts", "model", "devices", "shape"),
    [(3, "32B", "4x8xH100", (8, 3)), (6, "0.5B", "2x4xH100", (3, 2)), (5, "0.5B", "2x8xH100", (5, 1))],
)
def test_a_plan_that_leaves_devices_idle_is_saved_with_the_nodes_that_it_uses(prompts, model, devices, shape):
    settings = ["algorithm=grpo", f"model.path={model}", "data.train_files=[d.jsonl]", f"data.batch_size={prompts}"]
    plan, found = plan_on(compose_run(settings, config_name="ppo"), devices)
    saved = yaml.safe_load(run_file(plan, found.plans[0]))
    assert (saved["trainer.devices"], saved["trainer.nodes"]) == shape


def test_pools_with_more_devices_than_there_are_to_plan_on_are_an_error():
    pools = ["placement.pools={main: {devices: 16}}", "trainer.devices=8", "trainer.nodes=2"]
    composed = compose_run([*MODEL, *pools], config_name="ppo")
    with pytest.raises(ConfigError, match="The pools of this run have 16 devices, but --on has 8"):
        request_on(composed, cluster_of("8xH100"))


def test_sizes_that_do_not_divide_all_devices_are_planned_on_some_of_them():
    words = [*MODEL, "rollout.parallelism.tensor=2", "data.batch_size=64"]
    _, found = plan_on(compose_run(words, config_name="ppo"), "3xH100")
    assert vars(found.plans[0].layouts["rollout"])["tensor"] == 2


def test_a_run_that_is_planned_keeps_sizes_for_which_all_its_devices_are_too_many():
    words = ["placement=auto", "trainer.devices=3", "actor.parallelism.tensor=2", "actor.engine=fsdp"]
    composed, has_layout = checked_composition(words, config_name="ppo")
    plan = checked_plan(composed, device="cpu")
    assert has_layout
    assert plan.config.actor.parallelism.tensor == 2
    assert plan.pools[next(role.pool for role in plan.roles if role.name == "actor")] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["actor.parallelism.tensor=1000000000000"], "1,000,000,000,000 devices are more than the 8 devices"),
        (["rollout.parallelism.tensor=16"], "16 devices are more than the 8 devices that the run has"),
        (
            ["placement.pools={a: {devices: 6}, b: {devices: 2}}", "rollout.parallelism.tensor=4", "trainer.devices=8"],
            "rollout.parallelism.tensor=4: 4 does not divide the 6 devices that pool 'a' has",
        ),
    ],
)
def test_sizes_that_the_devices_do_not_have_are_an_error_before_the_search(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        plan_on(compose_run([*MODEL, *words], config_name="ppo"), "8xH100")
    assert "Use sizes whose product is" in caught.value.remedy


def test_a_tensor_parallel_size_that_spans_nodes_is_planned_if_it_is_given():
    sizes = ["actor.parallelism.tensor=8", "actor.parallelism.sequence=2", "actor.engine=fsdp"]
    words = [*MODEL, "algorithm=grpo", "model.path=Llama-3.1-70B", *sizes, "data.batch_size=64"]
    _, found = plan_on(compose_run(words, config_name="ppo"), "4x8xH100")
    layout = vars(found.plans[0].layouts["actor"])
    assert (layout["tensor"], layout["sequence"]) == (8, 2)


def test_a_run_file_of_pools_that_leave_devices_idle_asks_for_the_devices_of_the_pools():
    pools = ["placement.pools={a: {devices: 2}, b: {devices: 2}}", "placement.roles={critic: b}", "trainer.devices=4"]
    plan, found = plan_on(compose_run([*MODEL, *pools], config_name="ppo"), "8xH100")
    saved = yaml.safe_load(run_file(plan, found.plans[0]))
    assert (saved["trainer.devices"], saved.get("trainer.nodes", 1)) == (4, 1)
    words = [f"{key}={json.dumps(value)}" for key, value in saved.items() if key != "command"]
    checked_composition([*words, "model.path=builtin:calculator"], config_name="ppo")


@pytest.mark.parametrize(("devices", "batch"), [("16384x8xH100", 1024), ("8xH100", 10**12), ("131072xcpu", 64)])
def test_absurd_numbers_are_answered_at_once(devices, batch):
    start = time.process_time()
    _, found = plan_on(compose_run([*MODEL, f"data.batch_size={batch}"], config_name="ppo"), devices)
    assert found.plans
    assert time.process_time() - start < 15  # a few seconds here; minutes, or all memory, without limits


def test_more_than_a_trillion_of_anything_is_a_mistake():
    with pytest.raises(ConfigError, match="data.batch_size=1000000000000000 is too large"):
        compose_run(["data.batch_size=1000000000000000"], config_name="ppo")


def test_pools_of_reward_functions_may_be_larger_than_a_batch():
    pools = "placement.pools={training: {devices: 1}, cpus: {devices: 4, device: cpu}}"
    words = [pools, "placement.roles={reward: cpus}", "data.batch_size=2"]
    composed, _ = checked_composition(["algorithm=grpo", *words], config_name="ppo")
    plan = checked_plan(composed, device="cpu")
    (mesh,) = (role.mesh for role in plan.roles if role.name == "reward")
    assert mesh.sizes == {"data": 2, "tensor": 2}
    assert plan_on(compose_run(["algorithm=grpo", *MODEL, *words], config_name="ppo"), "1xH200")[1].plans


LONG = ["model.path=Qwen3-30B-A3B", "data.train_files=[data.jsonl]", "data.batch_size=512"]
LONG += ["data.max_response_tokens=8192", "algorithm=grpo"]


def test_a_plan_of_an_asynchronous_run_lets_generation_and_learning_overlap():
    plan, found = plan_on(compose_run([*LONG, "asynchrony.max_staleness=1"], config_name="ppo"), "4x8xH100")
    best, colocated = found.plans[0], found.best_of_kind["colocated"]
    assert found.request.lag == 1 and not found.request.may_run_ahead
    assert [each.name for each in found.request.operations if each.is_ahead] == ["rollout.generate", "reward.score"]
    assert {roles for roles, _ in best.pools.values()} == {("rollout",), ("actor",)}
    each_seconds = (seconds.total for seconds in best.operation_seconds())
    times = dict(zip((each.name for each in best.request.operations), each_seconds, strict=True))
    learning = sum(own for name, own in times.items() if name.startswith("actor."))
    longer = max(times["rollout.generate"] + times["actor.publish_weights"], learning)
    assert best.seconds == pytest.approx(longer) and best.seconds < sum(times.values())
    saved = yaml.safe_load(run_file(plan, best))
    assert saved["placement.roles.reward"] == saved["placement.roles.rollout"] != saved["placement.roles.actor"]
    synchronous = plan_on(compose_run(LONG, config_name="ppo"), "4x8xH100")[1]
    assert colocated.seconds == pytest.approx(synchronous.best_of_kind["colocated"].seconds)  # nothing overlaps


def test_generating_ahead_is_a_change_where_the_run_can_learn_from_older_samples():
    words = "asynchrony.max_staleness=1 (the rollout generates one step ahead, with older weights)"
    _, found = plan_on(compose_run(LONG, config_name="ppo"), "4x8xH100")
    change = next(each for each in faster(found.plans[0]) if each.words == words)
    _, ahead = plan_on(compose_run([*LONG, "asynchrony.max_staleness=1"], config_name="ppo"), "4x8xH100")
    assert change.step.seconds == ahead.plans[0].seconds
    _, request = request_on(compose_run([*LONG, "algorithm.policy_loss=gpg"], config_name="ppo"), cluster_of("8xH100"))
    assert not request.may_run_ahead
