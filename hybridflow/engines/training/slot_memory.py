"""Memory of a rollout engine in which a training engine's parameters can be."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridflow.parallel.boxes import contains
from hybridflow.parallel.layout import WeightShard


def place_of(shard: WeightShard, slots: Mapping[str, WeightShard]) -> Tensor | None:
    """The shard's place in the slot of its weight; None if there is no such slot of its dtype and device."""
    slot = slots.get(shard.name)
    if slot is None or slot.layout.shape != shard.layout.shape or not contains(slot.layout.box, shard.layout.box):
        return None
    place = slot.part(shard.layout.box)
    return place if (place.dtype, place.device) == (shard.tensor.dtype, shard.tensor.device) else None


def slot_memory(own: Sequence[WeightShard], slots: Mapping[str, WeightShard]) -> Tensor | None:
    """The flat memory in which slots hold a parameter's weights as the parameter does; None if their layouts differ.

    `own` are all weights of one parameter, which are one run of elements. Their places in the slots must be one run
    too, in the same order: whole rows of a weight, or several weights one after another.
    """
    starts = set()
    for shard in own:
        place = place_of(shard, slots)
        if place is None or place.stride() != shard.tensor.stride():
            return None
        starts.add((place.untyped_storage().data_ptr(), place.storage_offset() - shard.tensor.storage_offset()))
    if len(starts) != 1:
        return None
    ((_, start),) = starts
    first = min(shard.tensor.storage_offset() for shard in own)
    size = sum(shard.tensor.numel() for shard in own)
    return slots[own[0].name].tensor.as_strided((size,), (1,), start + first)
