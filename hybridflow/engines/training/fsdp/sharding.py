"""A model in shards: which modules gather together, and the piece of each parameter that a rank holds.

The only file that knows FSDP2's inner parts: PyTorch offers no other way to say where a shard's memory is.
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
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import TensorLayout, WeightShard


class HeldParameter:
    """A parameter of a model, of which this rank holds a piece: whole rows, possibly none.

    `shard` is the piece as a plain tensor, the same object for as long as the engine lives, wherever its memory is:
    what an optimizer moves. Gradients come from FSDP (`take_gradient`), already summed over ranks, in float32.
    `counts` is true on one of the ranks that hold the same piece.
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
        """Nothing until the parameter is placed."""
        self.is_bound = False
        """Its memory is a rollout engine's as well, and stays where it is."""

    @property
    def padded_numel(self) -> int:
        """Elements of the memory it needs: a rank with fewer rows than others is filled up for the all-gather."""
        return math.prod(self._fsdp.padded_sharded_param_size if self._fsdp else self.layout.local_shape)

    @property
    def is_whole_memory(self) -> bool:
        """The piece fills the memory it needs, without padding."""
        return self.padded_numel == math.prod(self.layout.local_shape)

    @torch.no_grad()
    def place(self, memory: Tensor) -> None:
        """Makes `memory` (flat, `padded_numel` elements) that of this rank's piece, as it is: nothing is copied."""
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

    def forget_gradient(self) -> None:
        """Drops the gradient, taken or not: that of a step that failed must not be added to the next."""
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
    """Shards a model in place, layer by layer, and lists what this rank holds; none of it is placed in memory yet.

    `root` is the module that is called, `model` the part of it that has the parameters. Gradients are summed over the
    ranks in float32. One rank alone shards nothing.
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
    """Called once all parameters are placed: FSDP makes its plan, and keeps reduced gradients in float32."""
    if isinstance(root, FSDPModule):
        root._get_fsdp_state()._lazy_init()
        for module in _sharded_modules(root):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._orig_dtype = torch.float32


def reshard(root: nn.Module) -> None:
    """Gives back what a forward pass without a backward pass left gathered."""
    for module in _sharded_modules(root):
        module.reshard()


@contextmanager
def undone_on_failure(root: nn.Module) -> Iterator[None]:
    """A pass that fails leaves nothing behind in FSDP.

    Neither parameters that stay gathered, which would hide all later changes of the shards from the next passes, nor
    sums of gradients that copies of the model have not exchanged yet.
    """
    try:
        yield
    except BaseException:
        if isinstance(root, FSDPModule):
            root.reset_iter_state()
        raise


def rows_of(size: int, parts: int, index: int) -> tuple[int, int]:
    """The rows of part `index` when `parts` ranks divide `size` rows: all as many, but for the last ones."""
    each = math.ceil(size / parts)
    return min(size, index * each), min(size, (index + 1) * each)


def held_shards(parameter: HeldParameter, tensor: Tensor | None = None) -> list[WeightShard]:
    """The weights in this rank's piece of a parameter, as views of it (or of a moment of it, or another copy)."""
    parts = parts_of(parameter.name, parameter.layout.shape, parameter.layout.box)
    return views(parameter.shard.data if tensor is None else tensor, parts)


@torch.no_grad()
def bind_parameter(parameter: HeldParameter, slots: Mapping[str, WeightShard]) -> list[str]:
    """Moves this rank's piece into the slots of its weights, and returns their names; none where it cannot be there.

    The slots' memory must be one run of elements in the piece's order and format: whole rows of a weight, or several
    weights one behind the other. A piece that is filled up for the all-gather has no place in a slot.
    """
    own = held_shards(parameter)
    if not parameter.is_whole_memory:
        return []
    memory = slot_memory(own, slots)
    if memory is None or len(memory) != parameter.padded_numel:
        return []
    memory.copy_(parameter.shard.flatten())
    parameter.place(memory)
    parameter.is_bound = True
    return [shard.name for shard in own]


def move_parameters(parameters: Sequence[HeldParameter], shelf: HostShelf, *, away: bool) -> None:
    """Takes each piece to the host or back, and lets go of where it was; those that a rollout engine shares stay."""
    free = {parameter.name: parameter for parameter in parameters if not parameter.is_bound}
    moved = shelf.put({name: parameter.memory for name, parameter in free.items()}) if away else shelf.take([*free])
    for name, parameter in free.items():
        parameter.place(moved[name])


def clipped_norm(parameters: Sequence[HeldParameter], mesh: ShardMesh, *, limit: float) -> float:
    """The norm of the whole gradient, the same on all ranks; gradients of a larger norm are scaled down to `limit`.

    What several ranks hold counts once. A gradient that is not finite is left as it is.
    """
    own = get_total_norm([p.shard.grad for p in parameters if p.counts and p.shard.grad is not None])
    squares = own.to(mesh.device, torch.float64).square()
    norm = mesh.ranks.sum(squares, *mesh.ranks.mesh.sizes).sqrt()
    if norm.isfinite():
        clip_grads_with_norm_([p.shard for p in parameters], limit, norm.float())
    return float(norm)


def _without_views(root: nn.Module, arguments: tuple, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """FSDP's hooks are on what the root module returns, and would be lost with a view that is changed in place."""
    return {name: output.clone() if output._is_view() else output for name, output in outputs.items()}


def _layout(parameter: nn.Parameter, mesh: ShardMesh) -> TensorLayout:
    """Tensor parallelism divides evenly and first, shards then divide the rows that are left."""
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
    """Tensor parallelism divides it."""
    return isinstance(parameter, DTensor) and any(isinstance(placement, Shard) for placement in parameter.placements)


def _units(model: nn.Module) -> Sequence[nn.Module]:
    """What is gathered by itself: each layer, and modules whose format is not the rest's (the value head)."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    format_of_most = next(model.parameters()).dtype
    others = [
        module
        for module in model.modules()
        if any(parameter.dtype is not format_of_most for parameter in module.parameters(recurse=False))
    ]
    return [*layers, *others]


def _sharded_modules(root: nn.Module) -> list[FSDPModule]:
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _fsdp_parameters(root: nn.Module) -> Iterator[FSDPParam]:
    for module in _sharded_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            yield from group.fsdp_params
