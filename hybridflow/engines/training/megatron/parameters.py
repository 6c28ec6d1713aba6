"""A rank's parameters as canonical shards, as views of a rollout's memory, and in host memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.megatron.model import Chunk
from hybridflow.engines.training.slot_memory import place_of
from hybridflow.models.names.parts import Part, views
from hybridflow.parallel.layout import WeightShard


def held_parameters(chunks: Sequence[Chunk]) -> Iterator[tuple[nn.Parameter, Part]]:
    """Each parameter of a rank, and the part of a canonical weight that it holds.

    A tied head on the rank with the embedding has no parameter of its own. On other ranks, the last stage's copy of
    the embedding is another part of the same weight.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield parameter, chunk.parts[name]


def held_shards(chunks: Sequence[Chunk]) -> Iterator[WeightShard]:
    """Every weight that a rank holds, without the rows that pad the vocabulary."""
    for parameter, part in held_parameters(chunks):
        yield from views(parameter.data, [part])


@torch.no_grad()
def bind_parameters(chunks: Sequence[Chunk], slots: Mapping[str, WeightShard]) -> set[str]:
    """Makes parameters views of the slots that contain them, and copies their values there.

    A parameter with a padded vocabulary is not bound, because slots have no padding. Returns the names of the weights
    whose parts on this rank are all bound; each chunk's `bound` has its bound parameters.
    """
    bound: set[str] = set()
    left: set[str] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            (shard,) = views(parameter.data, [chunk.parts[name]])
            place = place_of(shard, slots)
            if place is None or place.shape != parameter.shape:
                left.add(shard.name)
                continue
            parameter.data = place.copy_(parameter.data)
            chunk.bound.add(parameter)
            bound.add(shard.name)
    return bound - left


class _Place(NamedTuple):
    """Where a parameter is: the memory, named after the first parameter in it, and its shape, strides and offset."""

    memory: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WaitingParameters:
    """Moves the parameters that no rollout engine shares; parameters in the same memory keep their relative places.

    Experts' weights, for example, are multiplied together and must stay contiguous.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._places: dict[nn.Parameter, _Place] = {}

    def move(self, pool: HostPool, *, away: bool) -> None:
        """Moves the parameters to the host (`away`), or back to the device."""
        memories = (
            pool.put(self._memories())
            if away
            else pool.take(list(dict.fromkeys(p.memory for p in self._places.values())))
        )
        for parameter, place in self._places.items():
            memory = memories[place.memory]
            parameter.data = memory.as_strided(place.shape, place.stride, memory.storage_offset() + place.offset)

    def _memories(self) -> dict[nn.Parameter, Tensor]:
        """The memories that hold the parameters; records in `_places` where each parameter is."""
        first_in: dict[int, nn.Parameter] = {}
        memories: dict[nn.Parameter, Tensor] = {}
        self._places = {}
        bound = set().union(*(chunk.bound for chunk in self._chunks))
        for parameter in (each for chunk in self._chunks for each in chunk.parameters() if each not in bound):
            old, storage = parameter.data, parameter.data.untyped_storage()
            first = first_in.setdefault(storage.data_ptr(), parameter)
            if first is parameter:
                memories[first] = torch.empty(0, dtype=old.dtype, device=old.device).set_(storage)
            self._places[parameter] = _Place(first, old.shape, old.stride(), int(old.storage_offset()))
        return memories
