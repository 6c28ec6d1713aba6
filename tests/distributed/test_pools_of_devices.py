"""Pools of CPUs, and pools on nodes with a resource: what runs on them learns what it learns in one pool."""

from pathlib import Path

import pytest

from hybridflow.controller import Backend
from hybridflow.observability.trace import STEP, read_trace
from tests.distributed.processes import program_answer
from tests.distributed.runs import reproducible, rows_of_run, small_run

CPUS = "placement.pools={main: {devices: 1}, cpus: {devices: 2, device: cpu}}"
ON_RAY = "trainer.backend=ray"


def pools_of_calls(run_dir: Path) -> dict[str, str]:
    """The pool in which each call of the last step ran."""
    *_, last = (section for section in read_trace(run_dir) if section.what == STEP)
    return {span.name: span.pool for span in last.spans}


@pytest.mark.slow
@pytest.mark.ray
def test_reward_functions_in_a_pool_of_cpus_score_as_in_the_pool_of_the_actor(tmp_path: Path, ray_backend: Backend):
    settings = [*small_run(tmp_path), "trainer.total_steps=2"]
    together = reproducible(rows_of_run(tmp_path / "together", settings))
    for name, backend in (("local", []), ("ray", [ON_RAY])):
        rows = rows_of_run(tmp_path / name, [*settings, *backend, CPUS, "placement.roles={reward: cpus}"])
        assert reproducible(rows) == together
        pools = pools_of_calls(tmp_path / name)
        assert (pools["reward.score"], pools["actor.update"], pools["rollout.generate"]) == ("cpus", "main", "main")


@pytest.mark.slow  # the quick case of two pools: tests/distributed/test_runs_engines.py
@pytest.mark.ray
def test_a_critic_in_a_pool_of_cpus_learns_next_to_the_actor(tmp_path: Path, ray_backend: Backend):
    settings = [*small_run(tmp_path), "trainer.total_steps=2", ON_RAY, CPUS, "placement.roles={critic: cpus}"]
    rows = rows_of_run(tmp_path / "run", settings)
    assert rows[-1]["step"] == 2
    assert pools_of_calls(tmp_path / "run")["critic.update"] == "cpus"


PROGRAM = """
import json, os, sys, time
from pathlib import Path
import ray
from ray.cluster_utils import Cluster
from hybridflow.controller import ResourcePool
from hybridflow.controller.backends.ray.cluster import connect, disconnect
from hybridflow.controller.backends.ray.placement import reserved
from hybridflow.errors import ResourceError
from tests.distributed.runs import rows_of_run, small_run

folder, found = Path(sys.argv[1]), {}
DEVICE, CARD = "hybridflow_device", "accelerator_type:A100"
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {DEVICE: 4, "many_cores": 4}})
cluster.add_node(num_cpus=1, resources={DEVICE: 4, CARD: 1})
os.environ["RAY_ADDRESS"] = cluster.address
connect(4, 1, "cpu")
names = {}
for node in ray.nodes():
    names[node["NodeID"]] = "card" if CARD in node["Resources"] else "cores"

def nodes(resource, devices, block=1):
    group, slots = reserved(ResourcePool("main", devices, resource=resource, block=block), [], timeout_seconds=60.0)
    ray.util.remove_placement_group(group)
    time.sleep(0.3)
    return [names[slot.node] for slot in slots]

found["many_cores"], found["card"] = nodes("many_cores", 3), nodes(CARD, 4, block=2)
for resource, devices in (("fast_disk", 1), (CARD, 5)):
    try:
        reserved(ResourcePool("main", devices, resource=resource), [], timeout_seconds=1.0)
    except ResourceError as error:
        found[resource] = [error.message, error.remedy]
disconnect()
pools = "placement.pools={main: {devices: 2, resource: '%s'}, cpus: {devices: 2, device: cpu, resource: many_cores}}"
words = ["trainer={backend: ray, devices: 2, total_steps: 2}", pools % CARD, "placement.roles={reward: cpus}"]
rows = rows_of_run(folder / "run", [*small_run(folder), *words])
found["steps"] = rows[-1]["step"]
cluster.shutdown()
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return program_answer(PROGRAM, str(tmp_path_factory.mktemp("nodes")))


@pytest.mark.ray
@pytest.mark.slow  # a cluster of two nodes of its own
def test_a_pool_is_on_the_nodes_with_its_resource(found):
    assert found["many_cores"] == ["cores"] * 3
    assert found["card"] == ["card"] * 4


@pytest.mark.ray
@pytest.mark.slow
def test_a_resource_that_no_node_has_is_named(found):
    message, remedy = found["fast_disk"]
    assert "needs 1 devices (cpu, on nodes with 'fast_disk')" in message
    assert "Correct placement.pools.main.resource" in remedy
    assert """--resources='{"fast_disk": 1}'""" in remedy
    assert "needs 5 devices (cpu, on nodes with 'accelerator_type:A100')" in found["accelerator_type:A100"][0]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_uses_pools_on_nodes_with_different_resources(found):
    assert found["steps"] == 2
