"""Weights written where an engine reads them."""

from collections.abc import Iterable, Mapping

import torch

from hybridflow.errors import EngineError
from hybridflow.parallel.layout import WeightShard


@torch.no_grad()
def write_shards(slots: Mapping[str, WeightShard], shards: Iterable[WeightShard]) -> None:
    """Copies each shard to its box in the slot of the same name, converting the number format where it differs.

    The slots hold whole weights.
    """
    for shard in shards:
        slot = slots.get(shard.name)
        if slot is None or slot.layout.shape != shard.layout.shape:
            found = "no such weight" if slot is None else f"it in shape {slot.layout.shape}"
            raise EngineError(
                f"The weight '{shard.name}' came in shape {shard.layout.shape}; the rollout engine has {found}.",
                remedy="Load both engines from the same model.path.",
            )
        slot.tensor[tuple(slice(low, high) for low, high in shard.layout.box)].copy_(shard.tensor)
