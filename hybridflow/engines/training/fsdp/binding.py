"""Parameters whose memory is a rollout engine's: FSDP gathers from it, AdamW writes into it, and nothing is sent."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.engines.training.fsdp.sharding import HeldParameter
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import Box, WeightShard


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
    if not own or not parameter.is_whole_memory or any(shard.name not in slots for shard in own):
        return []
    regions = [_region(slots[shard.name], shard.layout.box) for shard in own]
    memory = _one_run([shard.tensor for shard in own], [region for region in regions if region is not None])
    if memory is None or len(memory) != parameter.padded_numel:
        return []
    memory.copy_(parameter.shard.flatten())
    parameter.place(memory)
    parameter.is_bound = True
    return [shard.name for shard in own]


def _region(slot: WeightShard, box: Box) -> Tensor | None:
    """The part of a slot that is to hold a box; None where the slot does not hold all of it."""
    held = slot.layout.box
    if any(low < first or high > last for (low, high), (first, last) in zip(box, held, strict=True)):
        return None
    return slot.tensor[
        tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(box, held, strict=True))
    ]


def _one_run(own: Sequence[Tensor], regions: Sequence[Tensor]) -> Tensor | None:
    """The flat memory in which the regions lie as `own` lie in theirs; None where they do not."""
    if len(regions) != len(own):
        return None
    first = regions[0]
    start = first.storage_offset() - own[0].storage_offset()
    for region, piece in zip(regions, own, strict=True):
        is_alike = (region.dtype, region.device, region.stride()) == (piece.dtype, piece.device, piece.stride())
        is_there = region.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_alike and is_there and region.storage_offset() - piece.storage_offset() == start):
            return None
    size = sum(piece.numel() for piece in own)
    return first.as_strided((size,), (1,), start + own[0].storage_offset())
