"""Ranks, devices and waiting on a cluster of several nodes. In a process of its own: it needs a Ray of many nodes."""

import socket

import pytest

from hybridflow.controller.resource_pool import visible_gpu_bytes
from tests.distributed.processes import program_answer

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # seven nodes; the order of ranks is also in tests/unit/controller

PROGRAM = """
import json, logging, os, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from hybridflow.controller import ResourcePool
from hybridflow.controller.backends import joined_gpus
from hybridflow.controller.backends.ray.cluster import connect, disconnect
from hybridflow.controller.backends.ray.cluster import joined_node_gpus
from hybridflow.controller.backends.ray.placement import placed_pool, reserved
from hybridflow.controller.backends.ray.pulse import Pulse
from hybridflow.errors import ResourceError
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.plan.defaults import find_device

DEVICE = "hybridflow_device"
found, said = {}, []

class Said(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logging.getLogger("hybridflow").addHandler(Said())
logging.getLogger("hybridflow").setLevel("INFO")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 4, "resources": {DEVICE: 4}})
for _ in range(3):
    cluster.add_node(num_cpus=1, resources={DEVICE: 8})
os.environ["RAY_ADDRESS"] = cluster.address

def ranks(name, devices, *, block=1, seconds=60.0, keep=False):
    group, slots = reserved(ResourcePool("main", devices, block=block), [], timeout_seconds=seconds)
    nodes = [slot.node for slot in slots]
    found[name] = [sorted(set(nodes), key=nodes.index).index(node) for node in nodes]
    if not keep:
        remove_placement_group(group)
        time.sleep(0.3)

for words in ([], ["trainer.device=cuda"], ["trainer.device=cpu"]):
    said.clear()
    config = compose_run(["trainer.backend=ray", "trainer.devices=4", *words], config_name="ppo").config
    found["device " + " ".join(words)] = [find_device(config), *said]
found["early"] = connect(4, 1, "cuda")  # the backend that comes later ends the connection made for the question

ranks("24", 24)
ranks("28", 28)
ranks("24 in blocks of 8", 24, block=8)
ranks("16 in blocks of 4", 16, block=4)
one_each = placement_group([{DEVICE: 1}] * 4, strategy="STRICT_SPREAD")
one_each.wait(10)
ranks("16 in blocks of 8, 7 free on a node", 16, block=8)
said.clear()
try:
    ranks("held", 26, seconds=7.0)
except ResourceError as error:
    found["held"] = [str(error), *said]
remove_placement_group(one_each)
said.clear()
waiting = threading.Thread(target=ranks, args=("grown to 36", 36), kwargs={"block": 4})
waiting.start()
time.sleep(6.5)
cluster.add_node(num_cpus=1, resources={DEVICE: 8})
waiting.join()
found["grown"] = said
placed = placed_pool(ResourcePool("gpus", 2, "cuda"), [], Pulse(), threads=1, start_timeout_seconds=60.0)
found["own gpu"] = [info.device for info in ray.get([host.actor.info.remote() for host in placed.hosts])]
for gpus in (2, 1):
    cluster.add_node(num_cpus=0, num_gpus=gpus)
count = {node["NodeID"]: node["Resources"].get("GPU") for node in ray.nodes()}
def cards():
    own = count[ray.get_runtime_context().get_node_id()]
    return [80 << 30, 79 << 30] if own == 2 else [] if own == 4 else 1 // 0
found["memory"] = [(node.count, node.smallest) for node in joined_node_gpus(cards)]
found["without a stand-in"] = [(node.count, node.smallest) for node in joined_node_gpus()]
found["node"] = joined_node_gpus(cards)[0].node
disconnect()
found["memory of no cluster"] = joined_node_gpus()
cluster.shutdown()
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


@pytest.fixture(scope="module")
def found() -> dict:
    return program_answer(PROGRAM)


def test_above_16_devices_ranks_are_numbered_node_by_node(found):
    assert found["24"] == [rank // 8 for rank in range(24)]
    assert found["28"] == [rank // 8 for rank in range(28)]


def test_blocks_stay_on_one_node_where_a_node_has_room(found):
    assert found["24 in blocks of 8"] == [rank // 8 for rank in range(24)]
    blocks = [set(found["16 in blocks of 4"][start : start + 4]) for start in range(0, 16, 4)]
    assert all(len(nodes) == 1 for nodes in blocks)


def test_where_no_node_has_room_for_a_block_devices_are_taken_one_by_one(found):
    nodes = found["16 in blocks of 8, 7 free on a node"]
    assert len(nodes) == 16 and max(nodes.count(node) for node in nodes) == 7


def test_devices_held_by_another_job_are_waited_for_and_then_told_as_such(found):
    error, waits = found["held"]
    assert "the cluster has 28: 24 free, 0 held by other pools of this run, 4 by other jobs" in error
    assert "trainer.start_timeout_seconds" in error
    assert waits.startswith("pool=main waits for 26 devices (cpu), until ")


def test_a_cluster_that_grows_is_waited_for(found):
    assert len(found["grown to 36"]) == 36
    assert any("waits for 36 devices" in line and "the cluster has 28" in line for line in found["grown"])


def test_gpus_are_those_of_the_cluster_not_of_the_driver(found):
    for words in ("", "trainer.device=cuda"):
        device, line = found[f"device {words}"]
        assert device == "cuda"
        assert "4 GPUs of the 4 in the Ray cluster" in line
    assert found["device trainer.device=cpu"][0] == "cpu"
    assert found["early"] is True


def test_each_node_is_asked_for_the_memory_of_its_gpus_before_anything_starts(found):
    """Nodes without a free CPU too; one that fails is of unknown memory. Without a stand-in: this machine's GPUs."""
    assert sorted(found["memory"]) == [[1, 0], [1, 79 << 30], [1, 80 << 30], [4, 0]]
    here = min(visible_gpu_bytes(), default=0)
    assert sorted(found["without a stand-in"]) == [[1, here], [2, here], [4, here]]
    assert found["node"].startswith(f"node {socket.gethostname()} (")
    assert found["memory of no cluster"] is None


def test_each_rank_has_a_gpu_of_its_own_among_all_of_the_node(found):
    assert sorted(found["own gpu"]) == ["cuda:0", "cuda:1"]
