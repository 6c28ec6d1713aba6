"""The state of Megatron-Core's optimizers, moments and float32 copies, as shards of canonical weights."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from hybridflow.engines.training.state_files import SteppedTensor
from hybridflow.models.names.parts import Part
from hybridflow.parallel.layout import TensorLayout, WeightShard


def stepped_tensors(chain: ChainedOptimizer, parts: Mapping[nn.Parameter, Part]) -> Iterator[SteppedTensor]:
    """Every tensor that a rank's optimizers step; `parts` has the weight in each parameter."""
    for optimizer in chain.chained_optimizers:
        for parameter, tensor in stepped_pairs(optimizer):
            shards_of = partial(
                shards_in, parameter=parameter, part=parts[parameter], start=_start(optimizer, parameter)
            )
            yield SteppedTensor(parameter, tensor, optimizer.optimizer, shards_of)


def stepped_range(optimizer: MegatronOptimizer, parameter: nn.Parameter, whole: Tensor, size: int) -> Tensor:
    """The part of `whole`, a tensor of the parameter's shape, that corresponds to the `size` elements stepped here."""
    start = _start(optimizer, parameter)
    return whole if start is None else whole.view(-1)[start : start + size]


def shards_in(values: Tensor, *, parameter: Tensor, part: Part, start: int | None) -> Iterator[WeightShard]:
    """Views of `values` as shards of the parameter's weight: of the parameter's shape, or a flat range from `start`."""
    if start is None:
        yield WeightShard(part.name, values.detach()[part.region], part.layout)
        return
    columns = parameter[0].numel()
    held = part.layout.local_shape[0] * columns
    for first, end in row_runs(start, min(held, start + values.numel()), columns):
        yield _in_box(values.detach()[first - start : end - start], first, end, part)


def gradient_buffers(modules: Sequence[DistributedDataParallel]) -> Iterator[_ParamAndGradBuffer]:
    """The buffers in which the modules' gradients (and, with the distributed optimizer, weights) are contiguous."""
    for module in modules:
        yield from (*vars(module)["buffers"], *module.expert_parallel_buffers)


class FlatWeights:
    """Keeps weights in their own tensors, so that they can be views of a rollout's, and fills the buffer for each step.

    Megatron-Core's distributed optimizer moves all weights into one buffer, in which ranks exchange the ranges that
    they have stepped. Here the weights keep their own tensors, and the buffer is allocated for each step and freed
    after it. This costs one more copy of this rank's weights during the step, and nothing while the rollout generates.
    Without the distributed optimizer there is no buffer, and nothing happens.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel], own: Mapping[nn.Parameter, Tensor]) -> None:
        buffers = [buffer for buffer in gradient_buffers(modules) if buffer.param_data is not None]
        self._flat = {parameter: parameter.data for buffer in buffers for parameter in buffer.params}
        self._storages = [buffer.param_data.untyped_storage() for buffer in buffers if buffer.param_data is not None]
        self._bytes = [storage.nbytes() for storage in self._storages]
        for parameter in self._flat:
            parameter.data = own[parameter]
        self._free()

    @torch.no_grad()
    def fill(self) -> None:
        """Allocates the buffer, and copies into it the weights that the optimizer steps in place: those in float32."""
        for storage, size in zip(self._storages, self._bytes, strict=True):
            storage.resize_(size)
        for parameter, flat in self._flat.items():
            if parameter.dtype is torch.float32:
                flat.copy_(parameter)

    def target(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that receives a parameter's new values: in the buffer, or the parameter itself."""
        return self._flat.get(parameter, parameter).detach()

    @torch.no_grad()
    def empty(self) -> None:
        """Copies the new weights into their own tensors, and frees the buffer."""
        if self._flat:
            torch._foreach_copy_([parameter.data for parameter in self._flat], [*self._flat.values()])
        self._free()

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def row_runs(start: int, end: int, columns: int) -> Iterator[tuple[int, int]]:
    """Splits a range of a matrix's elements into at most three boxes: a row's end, whole rows, a row's beginning."""
    whole_from, whole_to = -(-start // columns) * columns, end // columns * columns
    edges = [start, end] if whole_from > whole_to else [start, whole_from, whole_to, end]
    for first, last in pairwise(edges):
        if first < last:
            yield first, last


def _in_box(values: Tensor, first: int, end: int, part: Part) -> WeightShard:
    """A run of `row_runs` as a shard of the part's weight."""
    layout = part.layout
    if len(layout.shape) == 1:
        low = layout.box[0][0]
        return WeightShard(part.name, values, TensorLayout(layout.shape, ((low + first, low + end),)))
    (top, _), (left, right) = layout.box
    columns = right - left
    rows, begin = (first // columns, -(-end // columns)), first % columns
    width = min(columns - begin, end - first)
    box = ((top + rows[0], top + rows[1]), (left + begin, left + begin + width))
    return WeightShard(part.name, values.view(rows[1] - rows[0], width), TensorLayout(layout.shape, box))


def _start(optimizer: MegatronOptimizer, parameter: nn.Parameter) -> int | None:
    """The first element of this rank's range in the flattened parameter; None means the whole parameter."""
    if not isinstance(optimizer, DistributedOptimizer):
        return None
    buffer, formats, bucket = optimizer.model_param_gbuf_map[parameter]
    return optimizer.gbuf_ranges[buffer][formats][bucket]["param_map"][parameter]["param"].start


def stepped_pairs(optimizer: MegatronOptimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters, and the tensor that the optimizer steps for each: the parameter, or a float32 copy or range of it."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = [
            *zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
            *zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = [
            *zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True),
            *zip(optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups, strict=True),
        ]
    else:
        own = [group["params"] for group in optimizer.param_groups]
        groups = [*zip(own, own, strict=True)]
    for parameters, tensors in groups:
        yield from zip(parameters, tensors, strict=True)
