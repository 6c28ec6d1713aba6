"""A rank's parameters as canonical shards, as views of a rollout's memory, and in host memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.megatron.model import Chunk
from hybridflow.models.names.parts import Part, views
from hybridflow.parallel.boxes import contains, slices_within
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
    whose parts on this rank are all bound; each chunk's `bound` names its bound parameters.
    """
    bound: set[str] = set()
    left: set[str] = set()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            part = chunk.parts[name]
            slot = slots.get(part.name)
            place = None if slot is None else _place_in(slot, part, parameter)
            if place is None:
                left.add(part.name)
                continue
            place.copy_(parameter.data)
            parameter.data = place
            chunk.bound.add(name)
            bound.add(part.name)
    return bound - left


_Key = tuple[int, str]
"""The number of a chunk, and the name of a parameter in it."""


class _Place(NamedTuple):
    """A parameter's place: its memory, named after the first parameter in it, and its shape and strides there."""

    memory: _Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WaitingParameters:
    """Moves the parameters that no rollout engine shares; parameters in the same memory keep their relative places.

    Experts' weights, for example, are multiplied together and must stay contiguous.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._places: dict[_Key, _Place] = {}

    def move(self, shelf: HostShelf, *, away: bool) -> None:
        """Moves the parameters to the host (`away`), or back to the device."""
        if away:
            self._point_to(shelf.put(self._taken()))
        else:
            self._point_to(shelf.take([*dict.fromkeys(place.memory for place in self._places.values())]))

    def _taken(self) -> dict[_Key, Tensor]:
        """The memories that hold the parameters; records in `_places` where each parameter is."""
        first_in: dict[int, _Key] = {}
        wholes: dict[_Key, Tensor] = {}
        self._places = {}
        for number, chunk in enumerate(self._chunks):
            for name, parameter in chunk.named_parameters():
                if name in chunk.bound:
                    continue
                old = parameter.data
                memory = old.untyped_storage()
                first = first_in.setdefault(memory.data_ptr(), (number, name))
                if first not in wholes:
                    wholes[first] = torch.empty(0, dtype=old.dtype, device=old.device).set_(memory)
                self._places[number, name] = _Place(first, old.shape, old.stride(), int(old.storage_offset()))
        return wholes

    def _point_to(self, memories: dict[_Key, Tensor]) -> None:
        for (number, name), place in self._places.items():
            memory = memories[place.memory]
            parameter = self._chunks[number].get_parameter(name)
            parameter.data = memory.as_strided(place.shape, place.stride, memory.storage_offset() + place.offset)


def _place_in(slot: WeightShard, part: Part, parameter: nn.Parameter) -> Tensor | None:
    """The parameter's place in a slot; None if the slot does not contain all of it, or has another dtype or device."""
    if (slot.tensor.dtype, slot.tensor.device) != (parameter.dtype, parameter.device):
        return None
    if slot.layout.shape != part.layout.shape or not contains(slot.layout.box, part.layout.box):
        return None
    piece = slot.tensor[slices_within(part.layout.box, slot.layout.box)]
    return piece if piece.shape == parameter.shape else None
