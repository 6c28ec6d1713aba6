"""The devices on which a run is planned, and how many of them each of its roles can use."""

import logging
from types import SimpleNamespace

import pytest
import ray
import torch
import yaml

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.planning import plan_on, request_on, run_file
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.costs import StepCosts

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
    request = request_on(compose_run(settings, config_name="ppo"), cluster_of(f"{devices}xCPU"))[1]
    assert {model.use.copies_state for model in request.models if model.use.is_trained} == {copies}
    assert not any(model.use.copies_state for model in request.models if not model.use.is_trained)


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
