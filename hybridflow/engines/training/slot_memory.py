"""Memory of a rollout engine in which a training engine's parameter can lie."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridflow.parallel.boxes import contains, slices_within
from hybridflow.parallel.layout import WeightShard


def slot_memory(own: Sequence[WeightShard], slots: Mapping[str, WeightShard]) -> Tensor | None:
    """The flat memory in which the slots of a parameter's weights lie as the parameter does; None where they do not.

    `own` are all weights of one parameter, which is one run of elements. Their places in the slots must be one run
    too, in the same order and number format: whole rows of a weight, or several weights one behind the other.
    """
    starts = set()
    for shard in own:
        slot, piece = slots.get(shard.name), shard.tensor
        if slot is None or slot.layout.shape != shard.layout.shape or not contains(slot.layout.box, shard.layout.box):
            return None
        place = slot.tensor[slices_within(shard.layout.box, slot.layout.box)]
        if (place.dtype, place.device, place.stride()) != (piece.dtype, piece.device, piece.stride()):
            return None
        starts.add((place.untyped_storage().data_ptr(), place.storage_offset() - piece.storage_offset()))
    if len(starts) != 1:
        return None
    ((_, start),) = starts
    first = min(shard.tensor.storage_offset() for shard in own)
    size = sum(shard.tensor.numel() for shard in own)
    return slots[own[0].name].tensor.as_strided((size,), (1,), start + first)
