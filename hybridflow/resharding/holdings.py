"""The weights that ranks hold, want and send, in a compact form. Imports without torch.

A model of 46,623 weights has a few dozen different boxes on a rank. A *roster* lists the names of the weights and the
*slot* of each: weights of one slot have the same shape, dtype and box. Ranks of one pipeline stage have the same
roster, which is sent once; only the boxes of the slots, a few hundred bytes, differ between them. From roster and boxes
any rank computes what another holds, on demand. Irregular layouts have more slots, and are still exact.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from hybridflow.parallel.boxes import Box, volume

SlotT = TypeVar("SlotT")

Kind = tuple[tuple[int, ...], int]
"""Shape of a weight, and bytes per element."""


class Holding(NamedTuple):
    """A part of a weight that a rank holds or wants: a `WeightShard` without its data."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    box: Box
    """Global indices of the part."""
    itemsize: int
    """Bytes per element."""


class Piece(NamedTuple):
    """A box of one weight that moves from a source rank to a destination, which may be the same rank.

    It lies inside one box that the source holds and inside one that the destination wants.
    """

    name: str
    box: Box
    source: int
    destination: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return volume(self.box) * self.itemsize


@dataclass(frozen=True)
class Roster:
    """Weights in order, the slot of each, and the kind of each slot."""

    names: tuple[str, ...]
    slots: tuple[int, ...]
    kinds: tuple[Kind, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.slots, self.kinds))

    @cached_property
    def slots_of(self) -> Mapping[str, tuple[int, ...]]:
        """The slots of each name; a rank may have several pieces of one weight."""
        found: dict[str, tuple[int, ...]] = {}
        for name, slot in zip(self.names, self.slots, strict=True):
            found[name] = (*found.get(name, ()), slot)
        return found


@dataclass(frozen=True)
class RankHoldings:
    """The weights that one rank holds or wants: a roster, and the box of each of its slots. Iterates over holdings."""

    roster: Roster
    boxes: tuple[Box, ...]

    def __iter__(self) -> Iterator[Holding]:
        roster = self.roster
        for name, slot in zip(roster.names, roster.slots, strict=True):
            shape, itemsize = roster.kinds[slot]
            yield Holding(name, shape, self.boxes[slot], itemsize)

    def boxes_of(self, name: str) -> list[Box]:
        """The boxes of one weight."""
        return [self.boxes[slot] for slot in self.roster.slots_of.get(name, ())]


Ranked = tuple[RankHoldings, ...]
"""One entry per rank."""


def ranked(lists: Iterable[Sequence[Holding] | RankHoldings]) -> Ranked:
    """The holdings of each rank; ranks with equal rosters share one object."""
    rosters: dict[Roster, Roster] = {}
    known: dict[int, RankHoldings] = {}
    found = []
    for own in lists:
        if id(own) not in known:
            made = own if isinstance(own, RankHoldings) else _compressed(own)
            known[id(own)] = replace(made, roster=rosters.setdefault(made.roster, made.roster))
        found.append((own, known[id(own)]))  # keeps `own` alive, so that no other object gets its id
    return tuple(holdings for _, holdings in found)


class Declared(NamedTuple):
    """The weights that a rank holds or wants, in the form in which ranks exchange them."""

    names: Sequence[str]
    slots: Sequence[int]
    """The slot of each name."""
    kinds: Sequence[tuple[tuple[int, ...], str]]
    """Shape and dtype of each slot."""
    boxes: Sequence[Box]
    """Box of each slot; differs from rank to rank."""

    @staticmethod
    def of(weights: Iterable[tuple[str, str, tuple[int, ...], Box]]) -> "Declared":
        """From the name, dtype, shape and box of each weight."""
        names, slots, found = _in_slots((name, (shape, dtype, box)) for name, dtype, shape, box in weights)
        return Declared(names, slots, [slot[:2] for slot in found], [slot[2] for slot in found])

    @property
    def roster_message(self) -> bytes:
        """All but the boxes, as bytes: equal on all ranks with the same weights in the same slots."""
        return json.dumps([self.names, self.slots, self.kinds], separators=(",", ":")).encode()


def read_roster(message: bytes) -> Declared:
    """Parses a `roster_message`; the boxes are sent separately."""
    names, slots, kinds = json.loads(message)
    return Declared(names, slots, [(tuple(shape), dtype) for shape, dtype in kinds], [])


def read_boxes(boxes: Iterable[Iterable[Sequence[int]]]) -> tuple[Box, ...]:
    """Boxes from parsed JSON."""
    return tuple([tuple([(low, high) for low, high in box]) for box in boxes])


class TransferRoster(NamedTuple):
    """A roster of the weights that some rank wants, with the element sizes in which they are sent."""

    roster: Roster
    chosen: tuple[int, ...]
    """The declared slot of each slot of the roster."""

    @staticmethod
    def of(declared: Declared, itemsizes: Mapping[str, int]) -> "TransferRoster":
        """From what a rank declares, and the bytes per element of each wanted weight."""
        own = zip(declared.names, declared.slots, strict=True)
        names, slots, found = _in_slots((name, (slot, itemsizes[name])) for name, slot in own if name in itemsizes)
        kinds = tuple((declared.kinds[slot][0], itemsize) for slot, itemsize in found)
        return TransferRoster(Roster(names, slots, kinds), tuple(slot for slot, _ in found))

    def on(self, boxes: Sequence[Box]) -> RankHoldings:
        """The holdings of a rank, given the boxes of its declared slots."""
        return RankHoldings(self.roster, tuple([boxes[slot] for slot in self.chosen]))


def _compressed(holdings: Iterable[Holding]) -> RankHoldings:
    names, slots, found = _in_slots((name, ((shape, itemsize), box)) for name, shape, box, itemsize in holdings)
    return RankHoldings(Roster(names, slots, tuple(kind for kind, _ in found)), tuple(box for _, box in found))


def _in_slots(weights: Iterable[tuple[str, SlotT]]) -> tuple[tuple[str, ...], tuple[int, ...], list[SlotT]]:
    """The names, the slot of each, and the distinct slots, numbered in order of appearance."""
    numbers: dict[SlotT, int] = {}
    pairs = [(name, numbers.setdefault(slot, len(numbers))) for name, slot in weights]
    return tuple(name for name, _ in pairs), tuple(number for _, number in pairs), list(numbers)
