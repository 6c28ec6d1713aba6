"""The layouts that the search tries for a model on a number of devices: those that the engines accept.

Powers of two for the sizes that communicate in every layer, divisors for pipeline stages, and each memory setting.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from hybridflow.config.derived import divisors
from hybridflow.config.placement import Parallelism, RolloutParallelism
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.models.names.layouts import layout_problem

_MICROBATCH_ROWS = 4
"""Rows of the maximum length in the larger microbatches; the default of the setting is tried as well."""

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

    data_parallel: int
    """Prompts per optimizer step, which data-parallel ranks divide."""

    rows: int
    """Rows per optimizer step, over all devices."""


@dataclass(frozen=True)
class Given:
    """Values that the user chose, by the name of the layout's field; only layouts with these values are tried."""

    values: Mapping[str, int] = field(default_factory=dict)

    def among(self, name: str, candidates: Sequence[int]) -> Sequence[int]:
        """The candidates, or the given value alone."""
        return [self.values[name]] if name in self.values else candidates


def training_layouts(
    use: ModelUse, num_devices: int, engines: Sequence[TrainingEngine], limits: Limits, given: Given
) -> Iterator[TrainingLayout]:
    """All layouts of a trained or frozen model on exactly this number of devices, with no setting that saves memory
    unless it is given; see `saving_settings`."""
    is_alone = num_devices == 1 and TrainingEngine.single in engines
    plain = {name: bool(given.values.get(name, False)) for name in SAVING}
    for engine in [TrainingEngine.single] if is_alone else engines:
        for sizes in _sizes(engine, use, num_devices, limits, given):
            rows = max(1, limits.rows // int(sizes["data"]))
            longest = limits.longest_row
            wanted = {longest, _MICROBATCH_ROWS * longest, Training().microbatch_tokens}
            tokens = sorted({min(max(size, longest), rows * longest) for size in wanted})
            for microbatch_tokens in given.among("microbatch_tokens", tokens):
                yield TrainingLayout(engine=engine, **sizes, **plain, microbatch_tokens=microbatch_tokens)


def saving_settings(plain: TrainingLayout, given: Given, saves: Collection[str]) -> Iterator[TrainingLayout]:
    """A layout with every choice of the settings in `saves`, which save memory and take time; itself first."""
    for values in product(
        *([False, True] if name in saves and name not in given.values else [None] for name in SAVING)
    ):
        changed = {name: value for name, value in zip(SAVING, values, strict=True) if value}
        yield replace(plain, **changed) if changed else plain


def rollout_layouts(
    use: ModelUse, engine: str, num_devices: int, limits: Limits, given: Given, *, is_colocated: bool
) -> Iterator[RolloutLayout]:
    """All layouts of a rollout on exactly this number of devices, without a cache yet."""
    traits = rollout_traits(engine)
    narrow = _powers_of_two(min(num_devices, limits.devices_per_node)) if "tensor" in traits.axes else [1]
    for tensor, pipeline in product(given.among("tensor", narrow), given.among("pipeline", [1])):
        replica = tensor * pipeline
        sizes = RolloutParallelism(tensor=tensor, pipeline=pipeline)
        if num_devices % replica or num_devices // replica > limits.data_parallel:
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
    engine: TrainingEngine, use: ModelUse, num_devices: int, limits: Limits, given: Given
) -> Iterator[dict[str, int]]:
    """The parallel sizes of an engine that divide the model and the devices."""
    traits, model = TRAINING_ENGINES[engine], use.geometry
    if (num_devices > 1 and not traits.runs_on_several_devices) or (use.lora_rank and not traits.trains_adapters):
        return
    within_node = _powers_of_two(min(num_devices, limits.devices_per_node))
    axes = {
        "tensor": within_node,
        "sequence": within_node,
        "pipeline": [stages for stages in divisors(model.layers) if stages <= min(num_devices, _MOST_STAGES)],
        "virtual_pipeline": [1, 2],
        "expert": [size for size in divisors(max(model.experts, 1)) if size <= num_devices],
        "replicas": [1],
    }
    choices = {
        name: given.among(name, sizes) if name in traits.axes else [given.values.get(name, 1)]
        for name, sizes in axes.items()
    }
    for values in product(*choices.values()):
        sizes = dict(zip(choices, values, strict=True))
        inner = sizes["tensor"] * sizes["sequence"] * sizes["pipeline"]
        data, rest = divmod(num_devices, inner)
        is_useless = sizes["virtual_pipeline"] > 1 and sizes["pipeline"] == 1
        if rest or not data or data > limits.data_parallel or data % sizes["expert"] or is_useless:
            continue
        if -(-limits.data_parallel // data) * data > _MOST_UNEVEN * limits.data_parallel:
            continue
        if data % sizes["replicas"] or sizes["tensor"] * sizes["sequence"] > limits.devices_per_node:
            continue
        if layout_problem(model, traits.weights, _parallelism(sizes)) is None:
            is_megatron = engine is TrainingEngine.megatron
            yield {**sizes, "data": data, "sequence_parallel": is_megatron and sizes["tensor"] > 1}


def _parallelism(sizes: Mapping[str, int]) -> Parallelism:
    return Parallelism(
        tensor=sizes["tensor"],
        pipeline=sizes["pipeline"],
        virtual_pipeline=sizes["virtual_pipeline"],
        expert=sizes["expert"],
        sequence=sizes["sequence"],
        replicas=sizes["replicas"],
    )


def _powers_of_two(most: int) -> list[int]:
    return [1 << bit for bit in range(most.bit_length())]
