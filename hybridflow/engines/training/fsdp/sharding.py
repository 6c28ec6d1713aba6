"""Shards a model with FSDP2: which modules are gathered together, and the shard of each parameter on this rank.

The only file that uses FSDP2's internals: PyTorch has no public way to choose the memory of a shard.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridflow.engines.training.fsdp.mesh import ShardMesh
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import TensorLayout, WeightShard


class HeldParameter:
    """A parameter of a model, of which this rank holds a shard: whole rows, possibly none.

    `shard` is a plain tensor for the optimizer to step. It stays the same object for the engine's lifetime, wherever
    its memory is. `take_gradient` gives it the gradient from FSDP, already summed over ranks, in float32. `counts` is
    true on exactly one of the ranks with the same shard.
    """

    def __init__(
        self, name: str, parameter: nn.Parameter, layout: TensorLayout, *, counts: bool, fsdp: FSDPParam | None = None
    ) -> None:
        self.name = name
        self.layout = layout
        self.counts = counts
        self.trained = parameter.requires_grad
        self._fsdp = fsdp
        self._parameter = parameter
        self.memory = torch.empty(0, dtype=parameter.dtype)
        self.shard = nn.Parameter(self.memory, requires_grad=False)
        """Empty until the parameter is placed."""
        self.is_bound = False
        """Whether a rollout engine shares its memory, which then stays where it is."""

    @property
    def padded_numel(self) -> int:
        """Elements of memory that the shard needs: shards with fewer rows than others are padded for the all-gather."""
        return math.prod(self._fsdp.padded_sharded_param_size if self._fsdp else self.layout.local_shape)

    @torch.no_grad()
    def place(self, memory: Tensor) -> None:
        """Makes `memory` (flat, `padded_numel` elements) the memory of this rank's shard, without copying anything."""
        assert memory.shape == (self.padded_numel,), f"{self.name}: {tuple(memory.shape)} for {self.padded_numel}"
        size = math.prod(self.layout.local_shape)
        piece = memory[:size].view(self.layout.local_shape)
        if self._fsdp is not None:
            self._place_in_fsdp(self._fsdp, memory, piece)
        elif self._parameter.is_meta:
            torch.utils.swap_tensors(self._parameter, nn.Parameter(piece, requires_grad=self.trained))
        else:
            self._parameter.data = piece
        self.memory = memory
        self.shard.data = piece
        if self.trained:
            self._current.grad_dtype = torch.float32
            self.shard.grad_dtype = torch.float32

    def take_gradient(self) -> None:
        """Moves the gradient that FSDP left to `shard.grad`."""
        gradient = self._current.grad
        self.shard.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self._current.grad = None

    def clear_gradient(self) -> None:
        """Drops the gradient, taken or not: a failed step's gradient must not be added to the next."""
        self._current.grad = None
        self.shard.grad = None

    def _place_in_fsdp(self, fsdp: FSDPParam, memory: Tensor, piece: Tensor) -> None:
        fsdp._sharded_param_data = memory
        if fsdp.sharded_param.is_meta:
            fsdp.sharded_param = nn.Parameter(fsdp.to_sharded_dtensor(piece), requires_grad=self.trained)
            fsdp._setattr_on_modules(fsdp.sharded_param)
        else:
            cast(DTensor, fsdp.sharded_param)._local_tensor = piece

    @property
    def _current(self) -> nn.Parameter:
        return self._parameter if self._fsdp is None else self._fsdp.sharded_param


def shard_model(root: nn.Module, model: nn.Module, mesh: ShardMesh) -> list[HeldParameter]:
    """Shards a model in place, layer by layer, and returns this rank's shards, which have no memory yet.

    `root` is the module that is called, and `model` the part of it with the parameters. Gradients are summed over the
    ranks in float32. On a single rank nothing is sharded.
    """
    whole = dict(model.named_parameters())
    layouts = {name: _layout(parameter, mesh) for name, parameter in whole.items()}
    if mesh.ranks.mesh.size == 1:
        return [HeldParameter(name, parameter, layouts[name], counts=True) for name, parameter in whole.items()]
    counts = {name: mesh.is_first_holder(_is_divided(parameter)) for name, parameter in whole.items()}
    root.register_forward_hook(_without_views)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*_units(model), root):
        fully_shard(module, mesh=mesh.data, mp_policy=policy)
    for module in _sharded_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_reduce_scatter_unused_params(True, recurse=False)
    by_parameter = {id(fsdp.sharded_param): fsdp for fsdp in _fsdp_parameters(root)}
    return [
        HeldParameter(name, parameter, layouts[name], counts=counts[name], fsdp=by_parameter[id(parameter)])
        for name, parameter in model.named_parameters()
    ]


def finish_sharding(root: nn.Module) -> None:
    """Initializes FSDP once all parameters are placed, and makes it keep reduced gradients in float32."""
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()
        for module in _sharded_modules(root):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._orig_dtype = torch.float32


def reshard(root: nn.Module) -> None:
    """Frees the parameters that a forward pass without a backward pass left gathered."""
    for module in _sharded_modules(root):
        module.reshard()


@contextmanager
def reset_on_failure(root: nn.Module) -> Iterator[None]:
    """Resets FSDP's state if a pass fails.

    Otherwise parameters would stay gathered, and later passes would not see changes to the shards; and gradients that
    replicas have not reduced yet would be added to the next step's.
    """
    try:
        yield
    except BaseException:
        if isinstance(root, FSDPModule):
            root.reset_iter_state()
        raise


def rows_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """The rows of part `index` if `size` rows are split as `torch.chunk` does: in equal parts except the last ones."""
    each = math.ceil(size / parts)
    return min(size, index * each), min(size, (index + 1) * each)


def held_shards(parameter: HeldParameter, tensor: Tensor | None = None) -> list[WeightShard]:
    """The weights in this rank's shard of a parameter, as views of it, or of a `tensor` of its shape."""
    parts = parts_of(parameter.name, parameter.layout.shape, parameter.layout.box)
    return views(parameter.shard.data if tensor is None else tensor, parts)


@torch.no_grad()
def bind_parameter(parameter: HeldParameter, slots: Mapping[str, WeightShard]) -> list[str]:
    """Moves this rank's shard into the slots of its weights, and returns their names, or none if it does not fit.

    The slots must be one contiguous run of elements in the shard's order and dtype: whole rows of a weight, or several
    weights one after another. A shard that is padded for the all-gather does not fit.
    """
    own = held_shards(parameter)
    memory = slot_memory(own, slots)
    if memory is None or len(memory) != parameter.padded_numel:
        return []
    memory.copy_(parameter.shard.flatten())
    parameter.place(memory)
    parameter.is_bound = True
    return [shard.name for shard in own]


def clipped_norm(parameters: Sequence[HeldParameter], mesh: ShardMesh, *, limit: float) -> float:
    """The norm of the whole gradient, the same on all ranks; scales the gradient down if its norm exceeds `limit`.

    A shard on several ranks counts once. A gradient that is not finite is left unchanged.
    """
    own = get_total_norm([p.shard.grad for p in parameters if p.counts and p.shard.grad is not None])
    squares = own.to(mesh.device, torch.float64).square()
    norm = mesh.ranks.sum(squares, *mesh.ranks.mesh.sizes).sqrt()
    if norm.isfinite():
        clip_grads_with_norm_([p.shard for p in parameters], limit, norm.float())
    return float(norm)


def _without_views(root: nn.Module, arguments: tuple, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """FSDP's hooks are on the root module's outputs, and would be lost if a view was changed in place."""
    return {name: output.clone() if output._is_view() else output for name, output in outputs.items()}


def _layout(parameter: nn.Parameter, mesh: ShardMesh) -> TensorLayout:
    """This rank's part: tensor parallelism splits a parameter first, and FSDP then shards the remaining rows."""
    box: list[tuple[int, int]] = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if isinstance(placement, Shard):
                box[placement.dim] = rows_of(parameter.shape[placement.dim], mesh.tensor_size, mesh.tensor_index)
    first, last = box[0]
    low, high = rows_of(last - first, mesh.num_shards, mesh.shard_index)
    box[0] = (first + low, first + high)
    return TensorLayout(tuple(parameter.shape), tuple(box))


def _is_divided(parameter: nn.Parameter) -> bool:
    """Whether tensor parallelism shards the parameter."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def _units(model: nn.Module) -> Sequence[nn.Module]:
    """The modules gathered separately: each layer, and modules of a different dtype (the value head)."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    usual_dtype = next(model.parameters()).dtype
    others = [
        module
        for module in model.modules()
        if any(parameter.dtype is not usual_dtype for parameter in module.parameters(recurse=False))
    ]
    return [*layers, *others]


def _sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _fsdp_parameters(root: nn.Module) -> Iterator[FSDPParam]:
    for module in _sharded_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params
