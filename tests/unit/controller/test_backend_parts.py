"""The parts of backends, without a cluster: addresses, signals, silence, GPUs, the order of ranks, times, failures."""

import os
import signal

import pytest
import ray

from hybridflow.controller import BackendOptions, ResourcePool, make_backend
from hybridflow.controller.backends.ray.cluster import _initialized, check_cluster
from hybridflow.controller.backends.ray.host import visible_index
from hybridflow.controller.backends.ray.placement import Supply, divided_groups, slots_by_rank, too_few_devices
from hybridflow.controller.backends.ray.pulse import BEAT_SECONDS, HEAD_TIMEOUT_SECONDS, Silence
from hybridflow.controller.failures import backend_failure, how_it_ended
from hybridflow.elastic.stopping import Stop
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.parallel import ParallelMesh

SCATTERED = list("01111111100000002333333332222222")
"""The node of each of 32 bundles, as Ray 2.60 places them on 4 nodes of 8 devices."""


def nodes_by_rank(bundles, **sizes) -> list[str]:
    settings = {"devices_per_bundle": 1, "block": 1} | sizes
    return [slot.node for slot in slots_by_rank(dict(enumerate(bundles)), **settings)]


def test_scattered_bundles_are_numbered_node_by_node():
    nodes = nodes_by_rank(SCATTERED)
    assert [nodes.index(node) // 8 for node in nodes] == [rank // 8 for rank in range(32)]
    slots = slots_by_rank(dict(enumerate(SCATTERED)), devices_per_bundle=1, block=1)
    assert sorted(slot.bundle for slot in slots) == list(range(32))
    assert divided_groups(ParallelMesh({"data": 4, "tensor": 8}), SCATTERED)
    assert not divided_groups(ParallelMesh({"data": 4, "tensor": 8}), nodes)


def test_bundles_of_a_block_give_one_slot_for_each_rank():
    slots = slots_by_rank({0: "b", 1: "a", 2: "b"}, devices_per_bundle=2, block=2)
    assert [(slot.bundle, slot.node) for slot in slots] == [(0, "b")] * 2 + [(2, "b")] * 2 + [(1, "a")] * 2
    assert nodes_by_rank(["a", "b", "b", "c", "b", "c"]) == ["b", "b", "b", "c", "c", "a"], "most devices first"


@pytest.mark.parametrize(
    ("sizes", "tensor", "divided"),
    [({"a": 6, "b": 6}, 4, 1), ({"a": 5, "b": 6, "c": 5}, 4, 1), ({"a": 2, "b": 8, "c": 6}, 8, 1), ({"a": 3}, 3, 0)],
)
def test_on_uneven_nodes_as_few_groups_are_divided_as_can_be(sizes, tensor, divided):
    bundles = [node for node, size in sizes.items() for _ in range(size)]
    mesh = ParallelMesh({"data": len(bundles) // tensor, "tensor": tensor})
    assert len(divided_groups(mesh, nodes_by_rank(bundles, block=tensor))) == divided


def test_a_block_holds_strided_groups_whole():
    assert ParallelMesh({"data": 4, "tensor": 8}).block(("tensor",)) == 8
    assert ParallelMesh({"data": 2, "tensor": 2, "micro_tensor": 4}).block(("tensor",)) == 8
    assert ParallelMesh({"data": 4}).block(("tensor",)) == 1


def test_devices_held_by_other_jobs_are_told_from_those_that_do_not_exist():
    pool = ResourcePool("main", 4, "cuda")
    held = too_few_devices(pool, Supply(total=8, free=1, own=2), waited_seconds=600)
    assert (
        "4 devices (cuda) after 600 s; the cluster has 8: 1 free, 2 held by other pools of this run, 5 by other"
        in str(held)
    )
    assert "Wait for the other jobs to end" in held.remedy and "trainer.start_timeout_seconds" in held.remedy
    missing = too_few_devices(pool, Supply(total=2, free=2, own=0))
    assert missing.remedy.startswith("Lower trainer.devices or trainer.nodes")
    assert "ray start --address" in missing.remedy


@pytest.mark.parametrize("nodes", [1, 2])
def test_only_a_run_on_one_node_is_told_to_do_without_a_cluster(monkeypatch, nodes):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ResourceError, match="no process is listening there") as caught:
        check_cluster(nodes)
    assert ("unset RAY_ADDRESS" in caught.value.remedy) is (nodes == 1)
    assert ("trainer.nodes=2 needs a cluster" in caught.value.remedy) is (nodes == 2)


@pytest.mark.parametrize(("mode", "is_reported"), [(None, True), ("token", False)])
def test_a_cluster_that_refuses_is_told_with_the_settings_of_its_tokens(monkeypatch, mode, is_reported):
    def refused(**settings: object) -> None:
        raise ConnectionError("authentication failed")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(ResourceError, match="RAY_ADDRESS=10.0.0.1:6379: authentication failed") as caught:
        _initialized("10.0.0.1:6379")
    assert ("RAY_AUTH_MODE=token" in caught.value.remedy and "~/.ray/auth_token" in caught.value.remedy) == is_reported


@pytest.mark.parametrize("said", ["The current node timed out during startup. This could happen ...", ""])
def test_a_ray_that_does_not_start_is_an_error_with_a_remedy(monkeypatch, said):
    def late(**settings: object) -> None:
        raise Exception(said)

    monkeypatch.setattr(ray, "init", late)
    with pytest.raises(ResourceError, match=f"Ray: it could not start here: {said or 'Exception'}") as caught:
        _initialized("local")
    assert "see Ray's logs (/tmp/ray/session_latest/logs)" in caught.value.remedy
    assert "trainer.backend=local" in caught.value.remedy


def test_a_terminal_that_is_closed_while_ray_starts_stops_the_run(monkeypatch):
    def closed(**settings: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Ray's start replaces the handler
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr(ray, "init", closed)
    before, stop = signal.signal(signal.SIGHUP, signal.SIG_DFL), Stop()
    try:
        with stop.handled():
            own = signal.getsignal(signal.SIGTERM)
            with pytest.raises(KeyboardInterrupt):
                _initialized("local")
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop.status == 129


def test_a_head_that_never_answers_is_silent_for_as_long_as_it_was_asked():
    silence = Silence(0.0)
    assert [silence.look(0.0, float(now)) for now in range(1, 40)] == [float(now) for now in range(1, 40)]


def test_a_driver_that_was_stopped_for_minutes_does_not_blame_the_head():
    silence = Silence(0.0)
    assert silence.look(4.0, 6.0) == 2.0
    after = silence.look(4.0, 306.0)  # stopped in between: no answer came, and none was asked for
    assert after == 2.0 + 2 * BEAT_SECONDS < HEAD_TIMEOUT_SECONDS
    assert silence.look(307.0, 307.5) == 0.5
    assert silence.look(307.0, 309.5) == 2.5


@pytest.mark.parametrize(
    ("gpu", "visible", "index"), [("3", None, 3), ("3", "", 3), ("6", "2,3,6,7", 2), ("GPU-b", "GPU-a,GPU-b", 1)]
)
def test_a_gpu_is_counted_among_the_visible_ones(gpu, visible, index):
    assert visible_index(gpu, visible) == index


def test_a_backend_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no backend 'slurm'.*trainer\.backend=local or ray"):
        make_backend("slurm", BackendOptions())


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ("The actor died.\n class_name: RayHost\n Worker exit type: SYSTEM_ERROR: killed by SIGKILL.", "SIGKILL"),
        ("The actor died because of an error raised in its creation task, x\n File y\nImportError: no z", "no z"),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:"
            " Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1)",
            "it was killed or crashed",
        ),
        ("", "no reason given"),
    ],
)
def test_the_line_that_says_how_a_process_ended_is_found(report, expected):
    assert expected in how_it_ended(report)


def test_failures_of_the_backend_itself_have_a_remedy():
    message, remedy = backend_failure("RaySystemError", "System error\n  ModuleNotFoundError: No module named 'mine'")
    assert "No module named 'mine'" in message
    assert "PYTHONPATH" in remedy
    message, remedy = backend_failure("ObjectLostError", "Object 12 is lost.")
    assert "Object 12 is lost" in message
    assert "last checkpoint" in remedy
