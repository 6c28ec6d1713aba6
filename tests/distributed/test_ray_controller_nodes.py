"""A lost node is noticed and named. In a process of its own: it needs a Ray of two nodes beside the session's."""

import os

import pytest

from tests.distributed.processes import program_answer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROGRAM = """
import json, os, sys, time
from ray.cluster_utils import Cluster
from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import WorkerDied
from tests.unit.controller.workers import Talker

device = {"num_cpus": 1, "resources": {"hybridflow_device": 1}}
cluster = Cluster(initialize_head=True, head_node_args=device)
other = cluster.add_node(**device)
os.environ["RAY_ADDRESS"] = cluster.address
backend = make_backend("ray", BackendOptions(devices=1, nodes=2, threads=1))
group = WorkerGroup(Talker, ResourcePool("main", 2), backend, role="talker")
found = {"total": group.total(1.0).result()}
call = group.sleep(60.0)
time.sleep(0.3)
cluster.remove_node(other, allow_graceful=False)
start = time.perf_counter()
try:
    call.result()
except WorkerDied as error:
    found |= {"seconds": time.perf_counter() - start, "error": str(error), "role": error.role, "node": error.node}
backend.shutdown()
cluster.shutdown()
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


def test_the_loss_of_a_node_is_named_within_seconds():
    found = program_answer(PROGRAM)
    assert found["total"] == [3.0, 3.0]
    assert found["role"] == "talker"
    assert found["node"] == os.uname().nodename
    assert "talker.sleep" in found["error"]
    assert found["seconds"] < 20.0
