"""Shards that wait in the host's memory."""

from collections.abc import Sequence

from hybridflow.engines.training.fsdp.sharding import HeldParameter
from hybridflow.engines.training.host_memory import HostShelf


def move_parameters(parameters: Sequence[HeldParameter], shelf: HostShelf, *, away: bool) -> None:
    """Takes each piece to the host or back, and lets go of where it was; those that a rollout engine shares stay."""
    free = {parameter.name: parameter for parameter in parameters if not parameter.is_bound}
    moved = shelf.put({name: parameter.memory for name, parameter in free.items()}) if away else shelf.take([*free])
    for name, parameter in free.items():
        parameter.place(moved[name])
