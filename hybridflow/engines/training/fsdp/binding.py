"""Parameters whose memory is a rollout engine's: FSDP gathers from it, AdamW writes into it, and nothing is sent."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.engines.training.fsdp.sharding import HeldParameter
from hybridflow.engines.training.slot_memory import slot_memory
from hybridflow.models.names.huggingface import parts_of
from hybridflow.models.names.parts import views
from hybridflow.parallel.layout import WeightShard


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
