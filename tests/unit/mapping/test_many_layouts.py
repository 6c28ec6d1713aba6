"""The layouts that the search tries, and their costs computed for all of them at once."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hybridflow.config.placement import Parallelism
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.mapping.candidates import Given, Limits, saving_settings, training_layouts
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout, joined
from hybridflow.mapping.memory.training import training_memory
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.timing.calls import call_seconds
from hybridflow.mapping.timing.transfers import Transition, publish_seconds
from hybridflow.models.names.layouts import layout_problem
from tests.unit.mapping.clusters import CLUSTER, WORKLOAD, dense, mixture

ENGINES = (TrainingEngine.single, TrainingEngine.fsdp, TrainingEngine.megatron)
LIMITS = Limits(devices_per_node=8, longest_row=8512, prompts=48, rows=128)
LINKS = replace(
    CLUSTER, device=replace(CLUSTER.device, efficiency=replace(CLUSTER.device.efficiency, sync_seconds=1e-5))
)
DENSE = ModelUse(replace(dense(), model_type="llama"), 2, is_trained=True)
USES = {
    "dense": DENSE,
    "frozen, without a head": replace(DENSE, is_trained=False, has_language_head=False),
    "adapter": replace(DENSE, lora_rank=16),
    "experts": ModelUse(mixture(), 2, is_trained=True),
}
MANY = [*range(1, 17), 24, 48, 64]


def layouts_of(use: ModelUse, given: Given, sizes: list[int] = MANY) -> Iterator[TrainingLayout]:
    """All layouts, with and without each setting that saves memory."""
    for plain in training_layouts(use, sizes, ENGINES, LIMITS, given):
        worth = np.arange(len(plain.data)) % 3 > 0
        saves = dict.fromkeys(("gradient_checkpointing", "offload_parameters", "offload_optimizer"), worth)
        for _, layout in saving_settings(plain, given, saves):
            yield layout


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("shares_weights", [False, True])
def test_costs_of_many_layouts_are_those_of_each(name, shares_weights):
    use = USES[name]
    num_compared = 0
    for layouts in layouts_of(use, Given()):
        rollout = RolloutLayout(engine="vllm", replicas=2, tensor=4)
        memory = training_memory("actor", use, layouts, WORKLOAD, shares_weights=shares_weights)
        costs = [memory.resident_bytes, memory.extra_bytes, memory.host_bytes]
        costs += [
            call_seconds(kind, use, layouts, WORKLOAD, LINKS).total
            for kind in (OperationKind.forward, OperationKind.update)
        ]
        costs.append(publish_seconds(use, layouts, rollout, LINKS, Transition.micro_data).total)
        listed = layouts.listed()
        rows = np.stack([np.broadcast_to(cost, len(listed)) for cost in costs], axis=1)
        for layout, row in list(zip(listed, rows.tolist(), strict=True))[::7]:
            one = training_memory("actor", use, layout, WORKLOAD, shares_weights=shares_weights)
            assert row == [
                one.resident_bytes,
                one.extra_bytes,
                one.host_bytes,
                call_seconds(OperationKind.forward, use, layout, WORKLOAD, LINKS).total,
                call_seconds(OperationKind.update, use, layout, WORKLOAD, LINKS).total,
                publish_seconds(use, layout, rollout, LINKS, Transition.micro_data).total,
            ]
            num_compared += 1
    assert num_compared > 50


@pytest.mark.parametrize("name", ["dense", "experts", "adapter"])
def test_layouts_are_all_that_divide_the_model_and_the_devices(name):
    use = USES[name]
    found = [layout for layouts in training_layouts(use, MANY, ENGINES, LIMITS, Given()) for layout in layouts.listed()]
    assert len(found) == len(set(found))
    sizes = [(each.engine, *(vars(each)[axis] for axis in AXES), each.data) for each in found]
    assert set(sizes) == set(expected(use))


AXES = ("tensor", "sequence", "pipeline", "virtual_pipeline", "expert")


def expected(use: ModelUse) -> Iterator[tuple]:
    """Engine and sizes of all layouts, by trying every combination."""
    for engine, devices in product(ENGINES, MANY):
        traits = TRAINING_ENGINES[engine]
        if (engine is TrainingEngine.single) != (devices == 1) or (use.lora_rank and not traits.trains_adapters):
            continue
        for values in product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8, 16)):
            sizes = dict(zip(AXES, values, strict=True))
            data, rest = divmod(devices, values[0] * values[1] * values[2])
            if rest or not data or data % sizes["expert"] or values[0] * values[1] > 8:
                continue
            if any(size > 1 and axis not in traits.axes for axis, size in sizes.items()):
                continue
            is_even = max(len(range(rank, 48, data)) for rank in range(data)) * data <= 1.13 * 48
            if not is_even or data > 48 or (sizes["virtual_pipeline"] > 1 and sizes["pipeline"] == 1):
                continue
            if layout_problem(use.geometry, traits.weights, Parallelism(**sizes)) is None:
                yield (engine, *values, data)


def test_a_setting_is_chosen_only_where_it_is_worth_it_and_not_given():
    given = Given({"offload_parameters": 1})
    (plain,) = training_layouts(DENSE, [8, 16], [TrainingEngine.fsdp], LIMITS, given)
    worth = plain.data == 16
    choices = list(saving_settings(plain, given, {"gradient_checkpointing": worth, "offload_parameters": worth}))
    assert [len(rows) for rows, _ in choices] == [len(worth), worth.sum()]
    assert all(layout.offload_parameters for _, layout in choices)
    (_, without), (rows, chosen) = choices
    assert not without.gradient_checkpointing and chosen.gradient_checkpointing
    assert set(chosen.data) == {16} and (plain.tensor[rows] == chosen.tensor).all()


def test_joined_layouts_are_those_of_each():
    blocks = [next(layouts_of(DENSE, Given(), [size])) for size in (1, 4)]
    blocks += list(training_layouts(DENSE, [4], [TrainingEngine.fsdp], LIMITS, Given()))
    assert joined(blocks).listed() == [layout for block in blocks for layout in block.listed()]
