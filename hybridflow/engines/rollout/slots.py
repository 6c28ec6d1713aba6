"""Weights written where an engine reads them."""

from collections.abc import Collection, Iterable, Mapping

import torch

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import intersection, slices_within
from hybridflow.parallel.layout import WeightShard


@torch.no_grad()
def write_shards(
    slots: Mapping[str, WeightShard], shards: Iterable[WeightShard], *, elsewhere: Collection[str] = ()
) -> None:
    """Copies what each shard and the slot of its name have in common, converting the number format where it differs.

    `elsewhere` are weights of the model that other ranks hold; their shards are passed over.
    """
    for shard in shards:
        slot = slots.get(shard.name)
        if slot is None and shard.name in elsewhere:
            continue
        if slot is None or slot.layout.shape != shard.layout.shape:
            found = "no such weight" if slot is None else f"it in shape {slot.layout.shape}"
            raise EngineError(
                f"The weight '{shard.name}' came in shape {shard.layout.shape}; the rollout engine has {found}.",
                remedy="Load both engines from the same model.path.",
            )
        common = intersection(slot.layout.box, shard.layout.box)
        if common is not None:
            target = slot.tensor[slices_within(common, slot.layout.box)]
            target.copy_(shard.tensor[slices_within(common, shard.layout.box)])
