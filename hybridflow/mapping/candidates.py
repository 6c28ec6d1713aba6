"""The layouts that the search tries for a model on a number of devices: those that the engines accept.

Powers of two for the sizes that communicate in every layer, divisors for pipeline stages, and each memory setting.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from hybridflow.config.derived import divisors
from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.config.training import MICROBATCH_TOKENS, TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.models.names.layouts import layout_problem

_MICROBATCH_ROWS = (1, 2, 4)
"""Rows of the maximum length in a microbatch; the default of the setting is tried as well."""

_MOST_STAGES = 16
SAVING = ("gradient_checkpointing", "offload_parameters", "offload_optimizer")
"""Settings that save memory and take time."""

_MOST_UNEVEN = 1.13
"""Data-parallel ranks with the most prompts may have this many times the mean: 128 prompts on 48 ranks, not on 96."""


@dataclass(frozen=True)
class Limits:
    """Limits that the run sets, in addition to those of the model's dimensions."""

    devices_per_node: int
    longest_row: int
    """The longest prompt and response together, in tokens."""

    prompts: int
    """Prompts that the data-parallel ranks or the replicas of a role divide: those of an optimizer step for a trained
    role, those of the batch for others."""

    rows: int
    """Rows per optimizer step, over all devices."""

    is_cpu: bool = False
    """Whether the devices are CPUs, on which microbatches of more tokens than the default only take more time."""


@dataclass(frozen=True)
class Given:
    """Values that the user chose, by the name of the layout's field; only layouts with these values are tried."""

    values: Mapping[str, int] = field(default_factory=dict)

    def among(self, name: str, candidates: Sequence[int]) -> Sequence[int]:
        """The candidates, or the given value alone."""
        return [self.values[name]] if name in self.values else candidates


def training_layouts(
    use: ModelUse, num_devices: Sequence[int], engines: Sequence[TrainingEngine], limits: Limits, given: Given
) -> Iterator[TrainingLayout]:
    """All layouts of a trained or frozen model on exactly these numbers of devices: for each engine one layout whose
    sizes are arrays. None has a setting that saves memory unless it is given; see `saving_settings`."""
    plain = {name: bool(given.values.get(name, False)) for name in SAVING}
    for engine in engines:
        is_single = engine is TrainingEngine.single
        own = [size for size in num_devices if (size == 1) == is_single or TrainingEngine.single not in engines]
        sizes = _sizes(engine, use, np.array(own, dtype=int), limits, given)
        longest, rows = limits.longest_row, np.maximum(1.0, float(limits.rows) // sizes["data"])
        default = MICROBATCH_TOKENS["cpu" if limits.is_cpu else "cuda"]
        most = default if limits.is_cpu else math.inf
        wanted = [default, *(number * longest for number in _MICROBATCH_ROWS if number * longest <= most)]
        tokens = np.minimum(np.maximum(wanted, longest), rows[:, None] * longest)
        tokens = np.sort(tokens.astype(int), axis=1)
        if "microbatch_tokens" in given.values:
            tokens = np.full((len(rows), 1), given.values["microbatch_tokens"])
        row, column = np.nonzero(np.diff(tokens, axis=1, prepend=-1))
        sizes = {name: size[row] for name, size in sizes.items()}
        columns: dict[str, Any] = {**sizes, "microbatch_tokens": tokens[row, column]}
        yield TrainingLayout(engine=engine, **columns, **plain)


def saving_settings(
    plain: TrainingLayout, given: Given, saves: Mapping[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, TrainingLayout]]:
    """Layouts with every choice of the settings that save memory and take time, and their rows in `plain`. `saves` says
    which settings are worth choosing in each row. The first has none of them."""
    can_save = [name not in given.values and np.any(saves.get(name, False)) for name in SAVING]
    for values in product(*([False, True] if each else [False] for each in can_save)):
        chosen = [name for name, value in zip(SAVING, values, strict=True) if value]
        is_worth = np.ones(np.shape(plain.num_devices), dtype=bool)
        for name in chosen:
            is_worth &= saves[name]
        rows = np.flatnonzero(is_worth)
        settings: dict[str, Any] = dict.fromkeys(chosen, True)
        yield rows, replace(plain.at(rows), **settings)


def rollout_layouts(
    use: ModelUse, engine: str, num_devices: int, limits: Limits, given: Given, *, is_colocated: bool
) -> Iterator[RolloutLayout]:
    """All layouts of a rollout on exactly this number of devices, without a cache yet."""
    traits = rollout_traits(engine)
    narrow = _powers_of_two(min(num_devices, limits.devices_per_node)) if "tensor" in traits.axes else [1]
    for tensor, pipeline in product(given.among("tensor", narrow), given.among("pipeline", [1])):
        replica = tensor * pipeline
        sizes = RolloutParallelism(tensor=tensor, pipeline=pipeline)
        if num_devices % replica or num_devices // replica > limits.prompts:
            continue
        if layout_problem(use.geometry, traits.weights, sizes) is None:
            yield RolloutLayout(
                engine=engine,
                replicas=num_devices // replica,
                tensor=tensor,
                pipeline=pipeline,
                is_colocated=is_colocated,
            )


def _sizes(
    engine: TrainingEngine, use: ModelUse, num_devices: np.ndarray, limits: Limits, given: Given
) -> dict[str, np.ndarray]:
    """The parallel sizes of an engine that divide the model and the devices, in ascending order of devices."""
    traits, model, most = TRAINING_ENGINES[engine], use.geometry, int(num_devices.max(initial=0))
    if not traits.runs_on_several_devices:
        num_devices = num_devices[num_devices == 1]
    if use.lora_rank and not traits.trains_adapters:
        num_devices = num_devices[:0]
    within_node = _powers_of_two(min(most, limits.devices_per_node))
    axes = {
        "tensor": within_node,
        "sequence": within_node,
        "pipeline": [stages for stages in divisors(model.layers) if stages <= min(most, _MOST_STAGES)],
        "virtual_pipeline": [1, 2],
        "expert": [size for size in divisors(max(model.experts, 1)) if size <= most],
        "replicas": [1],
    }
    choices = [
        given.among(name, sizes) if name in traits.axes else [given.values.get(name, 1)] for name, sizes in axes.items()
    ]
    values: Iterator[dict[str, Any]] = (dict(zip(axes, own, strict=True)) for own in product(*choices))
    shapes = [shape for own in values if _is_useful(shape := Parallelism(**own), limits, given)]
    shapes = [shape for shape in shapes if layout_problem(model, traits.weights, shape) is None]
    sizes = {name: np.array([vars(shape)[name] for shape in shapes], dtype=int) for name in axes}
    inner = sizes["tensor"] * sizes["sequence"] * sizes["pipeline"]
    data, rest = np.divmod(num_devices[:, None], inner)
    divides = (rest == 0) & (data > 0) & (data <= limits.prompts)
    divides &= (data % sizes["expert"] == 0) & (data % sizes["replicas"] == 0)
    divides &= -(-limits.prompts // np.maximum(data, 1)) * data <= _MOST_UNEVEN * limits.prompts
    row, shape = np.nonzero(divides)
    found = {name: size[shape] for name, size in sizes.items()}
    is_megatron = engine is TrainingEngine.megatron
    return {**found, "data": data[row, shape], "sequence_parallel": is_megatron & (found["tensor"] > 1)}


def _is_useful(sizes: Parallelism, limits: Limits, given: Given) -> bool:
    """Whether the sizes make sense: those that communicate in every layer stay on a node, unless they are given."""
    is_useless = sizes.virtual_pipeline > 1 and sizes.pipeline == 1
    own = given.values.get("tensor", 1) * given.values.get("sequence", 1)
    return not is_useless and sizes.tensor * sizes.sequence <= max(limits.devices_per_node, own)


def _powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]
