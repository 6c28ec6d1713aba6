"""The fit of a device's constants to measured calls."""

from dataclasses import replace
from itertools import product

import pytest

from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.device_files import find_device
from hybridflow.mapping.devices import Cluster, Efficiency
from hybridflow.mapping.fitting import Observation, descended, fitted
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.catalogue import find_model

LAUNCHES = {"single": 4e-4, "fsdp": 3e-3, "megatron": 8e-4, "transformers": 6e-4}
SLOWDOWN = {"fsdp": 1.4, "megatron": 1.1}
REQUESTS = {"transformers": 4e-5}
LLAMA = replace(find_model("Llama-2-7b").geometry, vocab=64, layers=4, heads=4, kv_heads=4)
MODELS = [replace(LLAMA, hidden=hidden, intermediate=3 * hidden) for hidden in (128, 512)]


@pytest.fixture
def true_device() -> Cluster:
    """A CPU with known constants, of which two processes share one and a half cores."""
    known = find_device("CPU")
    device = replace(known.device, efficiency=Efficiency(0.62, 0.35, 3e-4), cores=1.5, launch_seconds=LAUNCHES)
    return replace(known, device=replace(device, request_seconds=REQUESTS, slowdown=SLOWDOWN))


def observed(device: Cluster) -> list[Observation]:
    """Calls of every engine with few and many rows that take exactly the predicted seconds."""
    found = []
    for model, rows, (engine, size) in product(MODELS, (4, 64), (("single", 1), ("fsdp", 2), ("megatron", 2))):
        workload = Workload(rows, Lengths.constant(16), Lengths.constant(32), 1)
        layout = TrainingLayout(engine=TrainingEngine[engine], data=size, gradient_checkpointing=False)
        use = ModelUse(model, 4, is_trained=True)
        found += [
            Observation(kind, use, layout, workload, 1.0) for kind in (OperationKind.forward, OperationKind.update)
        ]
        generating = RolloutLayout(engine="transformers", max_sequences=rows)
        found.append(Observation(OperationKind.generate, use, generating, workload, 1.0))
    return [replace(each, seconds=each.predicted_on(device)) for each in found]


def bare(device: Cluster) -> Cluster:
    """The device as its rates are measured, before the fit."""
    kind = replace(device.device, efficiency=Efficiency(1.0, 1.0, 3e-4), launch_seconds={}, request_seconds={})
    kind = replace(kind, slowdown={})
    return replace(device, device=kind)


def test_the_fit_recovers_the_constants_of_exact_measurements(true_device):
    found = fitted(bare(true_device), observed(true_device))
    # The search ends with steps of 0.2%, and constants partly make up for one another.
    assert found.device.efficiency.matrix == pytest.approx(0.62, rel=0.03)
    assert found.device.efficiency.bandwidth == pytest.approx(0.35, rel=0.03)
    assert found.device.launch_seconds == pytest.approx(LAUNCHES, rel=0.03)
    assert found.device.request_seconds == pytest.approx(REQUESTS, rel=0.05)
    assert found.device.slowdown == pytest.approx(SLOWDOWN, rel=0.05)
    assert found.node_link == pytest.approx(true_device.node_link, rel=0.03)
    assert found.device.efficiency.sync_seconds == 3e-4


def test_the_fit_of_noisy_measurements_predicts_each_within_the_noise(true_device):
    noise = (0.9, 1.1, 1.05, 0.95)
    noisy = [
        replace(each, seconds=each.seconds * noise[number % 4]) for number, each in enumerate(observed(true_device))
    ]
    found = fitted(bare(true_device), noisy)
    # Each measurement is off by at most 10%, and the fit lies between them.
    assert all(each.predicted_on(found) == pytest.approx(each.seconds, rel=0.2) for each in noisy)


def test_processes_that_share_cores_take_longer(true_device):
    alone = observed(true_device)[0]
    crowded = replace(true_device, num_devices=3, devices_per_node=3)
    assert crowded.crowding == 2
    assert replace(true_device, num_devices=1).crowding == 1
    assert replace(crowded, device=replace(crowded.device, cores=0)).crowding == 1
    assert alone.predicted_on(true_device) == alone.seconds


def test_the_descent_keeps_to_its_limits():
    found = descended([1.0, 1.0], lambda at: (at[0] - 5) ** 2 + (at[1] - 2) ** 2, lowest=[0.1, 0.1], highest=[3.0, 9.0])
    assert found == pytest.approx([3.0, 2.0], rel=0.01)
