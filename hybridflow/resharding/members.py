"""The data that ranks exchange before planning a transfer: their nodes, and the weights they hold and want."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from hybridflow.errors import EngineError
from hybridflow.parallel.collectives import Plain
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.holdings import Declared, RankHoldings, TransferRoster, read_boxes, read_roster
from hybridflow.resharding.transport import Transport

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""The dtypes that weights can have, by name."""


class Member(NamedTuple):
    """One rank of a transfer, as it describes itself to the others."""

    node: str
    neighbor: int | None
    """Index of its micro-data-parallel group."""
    holds: Declared
    wants: Declared

    @property
    def messages(self) -> tuple[bytes, bytes]:
        """The rosters of what it holds and wants, which many ranks share."""
        return self.holds.roster_message, self.wants.roster_message

    @property
    def own(self) -> Plain:
        """The rest, which differs between ranks."""
        return self.node, self.neighbor, self.holds.boxes, self.wants.boxes


def declared(shards: Iterable[WeightShard]) -> Declared:
    """A rank's shards in the form in which ranks exchange them."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    return Declared.of((shard.name, names[shard.dtype], shard.layout.shape, shard.layout.box) for shard in shards)


def exchanged(transport: Transport, own: Member) -> list[Member]:
    """All ranks' members; a collective call."""
    rosters = [transport.gather_messages(message) for message in own.messages]
    return members_from(rosters, transport.gather_plain(own.own))


def members_from(rosters: Sequence[Sequence[bytes]], of_rank: Sequence[Sequence]) -> list[Member]:
    """The members, from the rosters of all ranks (held, wanted) and each rank's own part. Parses equal rosters once."""
    read = {message: read_roster(message) for messages in rosters for message in dict.fromkeys(messages)}
    members = []
    for (node, neighbor, held_boxes, wanted_boxes), held, wanted in zip(of_rank, *rosters, strict=True):
        holds = read[held]._replace(boxes=read_boxes(held_boxes))
        members.append(Member(node, neighbor, holds, read[wanted]._replace(boxes=read_boxes(wanted_boxes))))
    return members


def wire_dtypes(members: Sequence[Member]) -> Mapping[str, torch.dtype]:
    """The dtype of each wanted weight; raises an error if two ranks want it in different ones."""
    known: dict[str, str] = {}
    rosters = {id(member.wants.names): (rank, member.wants) for rank, member in reversed(list(enumerate(members)))}
    for rank, wants in sorted(rosters.values(), key=lambda entry: entry[0]):
        for name, slot in zip(wants.names, wants.slots, strict=True):
            dtype = wants.kinds[slot][1]
            if known.setdefault(name, dtype) != dtype:
                raise EngineError(
                    f"Rank {rank} wants '{name}' in torch.{dtype}, other ranks in torch.{known[name]}.",
                    remedy="Give all ranks of the rollout the same model.dtype.",
                )
    return {name: DTYPES[dtype] for name, dtype in known.items()}


def transferred(holdings: Sequence[Declared], dtypes: Mapping[str, torch.dtype]) -> list[RankHoldings]:
    """Each rank's holdings in the dtypes in which they are sent, without the weights that no rank wants."""
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    rosters = {id(own.names): own for own in holdings}
    found = {key: TransferRoster.of(own, itemsizes) for key, own in rosters.items()}
    return [found[id(own.names)].on(own.boxes) for own in holdings]


def neighbors_of(members: Sequence[Member]) -> list[int] | None:
    """The micro-data-parallel group of each rank, or a group of its own; None if no rank has one."""
    if all(member.neighbor is None for member in members):
        return None
    return [-1 - rank if member.neighbor is None else member.neighbor for rank, member in enumerate(members)]
