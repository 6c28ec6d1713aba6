"""Which GPUs of a cluster the memory estimate is compared with."""

from types import SimpleNamespace

import pytest
import torch

from hybridflow.controller.resource_pool import NodeGpus
from hybridflow.errors import ResourceError
from hybridflow.launch.rules import memory
from hybridflow.launch.rules.memory import available_gpus, least_unavoidable, memory_problems, unchecked_gpus
from tests.unit.launch.plans import judged, planned

BIG, SMALL, SILENT = NodeGpus("node big", 8, 80 << 30), NodeGpus("node small", 8, 16 << 30), NodeGpus("node x", 8, 0)


def advice(*nodes: NodeGpus, wanted: int) -> str:
    return " ".join(map(str, unchecked_gpus(nodes, wanted)))


def test_the_smallest_gpus_count_that_the_run_cannot_avoid():
    assert least_unavoidable([SMALL, BIG], 16) is SMALL
    assert least_unavoidable([SMALL, BIG], 9) is SMALL
    assert least_unavoidable([BIG, BIG], 9) is BIG
    assert least_unavoidable([SMALL, BIG], 8) is BIG
    assert not advice(SMALL, BIG, wanted=9) and not advice(BIG, BIG, wanted=9)
    assert "the GPUs of node big; Ray may also choose smaller ones: 16.0 GiB on node" in advice(SMALL, BIG, wanted=8)


def test_nodes_of_unknown_memory_are_named_and_count_for_nothing():
    assert least_unavoidable([SILENT, BIG], 16) is BIG
    assert "unknown and not checked on node x" in advice(SILENT, BIG, wanted=16)
    assert least_unavoidable([SILENT], 1) is None


def test_a_driver_without_gpus_refuses_what_the_cluster_cannot_hold(monkeypatch):
    """The nodes' answer is the only stand-in."""
    tiny = NodeGpus("node small (10.0.0.2)", 1, 1 << 20)
    monkeypatch.setattr(memory, "joined_node_gpus", lambda kind: [tiny] if kind == "ray" else None)
    words = ["algorithm=grpo", "trainer.backend=ray", "rollout.engine=transformers"]
    with pytest.raises(ResourceError, match=r"and a GPU of node small \(10\.0\.0\.2\) has 0\.0 GiB") as caught:
        judged(planned(*words, device="cuda"), memory_problems)
    assert "or more devices (trainer.devices)" in caught.value.remedy
    judged(planned(*words), memory_problems)


@pytest.mark.parametrize(
    ("backend", "devices", "sizes", "expected"),
    [("local", 1, (24, 2), 24), ("local", 1, (2, 24), 2), ("ray", 1, (2, 24), 24), ("ray", 2, (24, 2), 2)],
)
def test_only_the_gpus_that_the_run_will_use_count_here(monkeypatch, backend, devices, sizes, expected):
    """A display card beside the one that computes; PyTorch's answers are the only stand-ins."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i] << 30))
    plan = planned(f"trainer.backend={backend}", f"trainer.devices={devices}")
    gpus = least_unavoidable(available_gpus(plan), devices)
    assert gpus is not None and (gpus.node, gpus.smallest) == ("this machine", expected << 30)
