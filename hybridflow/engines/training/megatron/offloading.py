"""Parameters of a rank's chunks that wait in the host's memory."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.megatron.model import Chunk

_Key = tuple[int, str]
"""The number of a chunk, and the name of a parameter in it."""


class _Place(NamedTuple):
    """Where a parameter lies: in which memory, named by the first parameter in it, and how."""

    memory: _Key
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class WaitingParameters:
    """The parameters that no rollout engine shares; those that lie in one memory lie alike in the new one.

    Experts' weights, for one, are moved by one product and must stay beside one another.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._places: dict[_Key, _Place] = {}

    def move(self, shelf: HostShelf, *, away: bool) -> None:
        """Takes the parameters to the host (`away`), or brings them back to the device."""
        if away:
            self._point_to(shelf.put(self._taken()))
        else:
            self._point_to(shelf.take([*dict.fromkeys(place.memory for place in self._places.values())]))

    def _taken(self) -> dict[_Key, Tensor]:
        """The memories of the parameters, and in `_places` where each lies in them."""
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
