"""The loss of a node: its processes start on another one, or the error says that none has room."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.processes import program_answer
from tests.distributed.raylets import two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]  # a Ray of several nodes, in a process of its own

PROGRAM = """
import json, os, sys, time
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.errors import ResourceError, WorkerDied
from tests.unit.controller.workers import Talker

device = {"num_cpus": 1, "resources": {"hybridflow_device": 1}}
cluster = Cluster(initialize_head=True, head_node_args=device)
others = [cluster.add_node(**device) for _ in range(2)]
os.environ["RAY_ADDRESS"] = cluster.address
backend = make_backend("ray", BackendOptions(devices=1, nodes=2, threads=1, start_timeout_seconds=40.0))
group = WorkerGroup(Talker, ResourcePool("main", 2), backend, role="talker")
found = {"totals": [group.total(1.0).result()]}
for _ in range(2):
    [placed] = backend._pools.values()
    used = placement_group_table(placed.group)["bundles_to_node_id"].values()
    lost = next(node for node in others if node.node_id in used)
    others.remove(lost)
    call = group.sleep(60.0)
    time.sleep(0.3)
    cluster.remove_node(lost, allow_graceful=False)
    try:
        call.result()
    except WorkerDied:
        broken = backend.broken(5.0)
    try:
        backend.respawn(broken.pools)
        found["totals"].append(group.total(2.0).result())
    except ResourceError as error:
        found["error"] = error.message
backend.shutdown()
cluster.shutdown()
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


def test_processes_of_a_lost_node_start_on_another_one_if_there_is_one():
    found = program_answer(PROGRAM)
    assert found["totals"] == [[3.0, 3.0], [6.0, 6.0]]
    assert "of the pool 'main' were lost, and new ones have not started within 40 s" in found["error"]


IN_COLLECTIVE = """
import json, os, signal, sys, time
from hybridflow.controller import BackendOptions, ResourcePool, WorkerGroup, make_backend
from hybridflow.elastic.fault_recovery import kind_of
from hybridflow.errors import WorkerError
from tests.unit.controller.workers import Talker

backend = make_backend("ray", BackendOptions(devices=1, nodes=2, threads=1, start_timeout_seconds=100.0))
group = WorkerGroup(Talker, ResourcePool("main", 2), backend, role="talker")
group.total(1.0).result()
call = group.totals_for(300.0)
time.sleep(0.5)
os.kill(int(sys.argv[1]), signal.SIGKILL)
found = {}
try:
    call.result()
except WorkerError as error:
    found = {"kind": kind_of(error).name, "message": error.message, "node": error.node}
backend.shutdown()
sys.stdout.write("\\n" + json.dumps(found) + "\\n")
"""


def test_a_node_that_is_lost_in_a_collective_is_a_lost_node(tmp_path: Path):
    # The other rank reports a broken connection long before Ray knows that the node is lost.
    with two_nodes(tmp_path) as nodes:
        command = [sys.executable, "-c", IN_COLLECTIVE, str(nodes.raylet(of_head=False).pid)]
        environment = {**nodes.environment, "RAY_ADDRESS": nodes.address, "RAY_AUTH_MODE": "token"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert found["kind"] == "lost_node", found
