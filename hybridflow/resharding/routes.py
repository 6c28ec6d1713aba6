"""How the weights that lie alike travel: the arithmetic of a plan, done once for all layers of a model.

A *class* is the weights that lie alike: same shape, same boxes on the same ranks. The cells of a class are its source
boxes (or their common refinement where they overlap), each with its holders; a *region* is a cell inside a box that is
wanted; a *row* is a region and a rank that wants it. A row has one or more candidates, the holders nearest to the rank,
and takes them in turn from weight to weight, so that a thousand equal layers load all of them alike.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import are_disjoint, box_text, cells, contains, uncovered, volume
from hybridflow.parallel.layout import Box

Ints = NDArray[np.int64]
Located = tuple[tuple[Box, tuple[int, ...]], ...]
"""Boxes, each with the ranks it is on."""


@dataclass(frozen=True)
class WeightClass:
    """Weights that lie alike: `names`, and their places in the order of all weights."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    held: Located
    wanted: Located


@dataclass(frozen=True, eq=False)
class World:
    """What is near what: the neighbourhood and the node of each rank, as numbers."""

    neighbours: Ints
    nodes: Ints

    @staticmethod
    def of(size: int, nodes: Sequence[str] | None, neighbours: Sequence[int] | None) -> "World":
        """Ranks without neighbours are nobody's neighbour; without nodes they are all on one."""
        return World(
            neighbours=np.arange(size) if neighbours is None else _numbered(neighbours),
            nodes=np.zeros(size, dtype=np.int64) if nodes is None else _numbered(nodes),
        )


@dataclass(frozen=True, eq=False)
class Route:
    """The rows of one class. Row i of the class's k-th weight comes from candidate (turn[i] + k) mod its number."""

    weights: WeightClass
    boxes: tuple[Box, ...]
    """Of the regions."""

    nbytes: Ints
    """Of the regions."""

    region: Ints
    destination: Ints
    turn: Ints
    first: Ints
    """Where a row's candidates begin in `candidates`; one more at the end."""

    candidates: Ints

    @property
    def is_fixed(self) -> bool:
        """Every row has one candidate, so that all weights of the class travel alike."""
        return len(self.candidates) == len(self.destination)

    def sources(self, rows: Ints, number: int) -> Ints:
        """The sources of some rows for the `number`-th weight of the class."""
        first = self.first[rows]
        return self.candidates[first + (self.turn[rows] + number) % (self.first[rows + 1] - first)]

    def rows_to(self, rank: int) -> Ints:
        """The rows of what a rank wants."""
        return np.flatnonzero(self.destination == rank)

    def rows_from(self, rank: int) -> Ints:
        """The rows of what a rank is a candidate for."""
        return np.unique(np.searchsorted(self.first, np.flatnonzero(self.candidates == rank), side="right") - 1)

    def rows_about(self, rank: int) -> Ints:
        """The rows of what a rank wants, or is a candidate for."""
        return np.union1d(self.rows_to(rank), self.rows_from(rank))

    def in_order(self, rows: Ints) -> Ints:
        """The rows by box, then by destination."""
        return rows[np.lexsort((self.destination[rows], self.region_order[self.region[rows]]))]

    @cached_property
    def gathered(self) -> tuple[tuple[tuple[int, ...], Ints], ...]:
        """The groups of ranks that exchange everything: each with the rows of its first rank, which say it all.

        Such ranks want the same regions from the same sources, all of which are among themselves.
        """
        order = np.argsort(self.destination, kind="stable")
        rows_of = np.split(order, np.flatnonzero(np.diff(self.destination[order])) + 1)
        alike: dict[tuple[bytes, bytes], list[Ints]] = defaultdict(list)
        for rows in rows_of:
            if (self.first[rows + 1] - self.first[rows] == 1).all():
                alike[self.region[rows].tobytes(), self.candidates[self.first[rows]].tobytes()].append(rows)
        found = []
        for members in alike.values():
            ranks = tuple(self.destination[[rows[0] for rows in members]].tolist())
            if len(ranks) > 1 and np.isin(self.candidates[self.first[members[0]]], ranks).all():
                found.append((ranks, members[0]))
        return tuple(found)

    @cached_property
    def gathering_ranks(self) -> Ints:
        """The ranks of all groups of `gathered`."""
        return np.array([rank for ranks, _ in self.gathered for rank in ranks], dtype=np.int64)

    @cached_property
    def region_order(self) -> Ints:
        """The place of each region's box among the sorted boxes, equal boxes alike."""
        places = {box: place for place, box in enumerate(sorted(set(self.boxes)))}
        return np.array([places[box] for box in self.boxes], dtype=np.int64)

    def entries(self) -> tuple[Ints, Ints, Ints]:
        """Every (row, candidate), and for how many of the class's weights that candidate is the source."""
        if self.is_fixed:
            return np.arange(len(self.candidates)), self.candidates, np.full_like(self.turn, len(self.weights.names))
        counts = np.diff(self.first)
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(self.candidates)) - self.first[row]
        number = (place - self.turn[row]) % counts[row]  # the first weight that comes from this candidate
        return row, self.candidates, (len(self.weights.names) - number + counts[row] - 1) // counts[row]

    def bytes_by(self, *, size: int, by_source: bool, is_moving: bool = True) -> Ints:
        """Bytes that move between `size` ranks, or that stay, by the rank that holds them or by the one that wants."""
        row, source, weights = self.entries()
        destination = self.destination[row]
        nbytes = self.nbytes[self.region[row]] * weights * ((source != destination) == is_moving)
        # bincount adds in float64: exact below 2 ** 53 bytes, and ten times as fast as add.at
        return np.bincount(source if by_source else destination, nbytes, size).astype(np.int64)


def make_route(weights: WeightClass, world: World, load: Ints) -> Route:
    """The rows of a class; `load`, the bytes each rank sends so far, says which candidates come first, and grows."""
    held = _disjoint(weights.held)
    boxes, cell, wanted = _regions(weights, held)
    destination, region = _rows(weights.wanted, wanted)
    turn, first, candidates = _candidates(destination, cell[region], held, world, load)
    volumes = np.array([volume(box) for box in boxes], dtype=np.int64)
    route = Route(
        weights=weights,
        boxes=boxes,
        nbytes=volumes * weights.itemsize,
        region=region,
        destination=destination,
        turn=turn,
        first=first,
        candidates=candidates,
    )
    load += route.bytes_by(size=len(load), by_source=True)
    return route


def _disjoint(held: Located) -> Located:
    """Disjoint boxes with all the ranks that hold each of them."""
    boxes = [box for box, _ in held]
    if are_disjoint(boxes):
        return held
    return tuple(
        (cell, tuple(sorted({rank for box, ranks in held if contains(box, cell) for rank in ranks})))
        for cell in cells(boxes)
    )


def _regions(weights: WeightClass, held: Located) -> tuple[tuple[Box, ...], Ints, Ints]:
    """Each region's box, the number of its cell, and that of the wanted box it is part of, in ascending order."""
    dims = len(weights.shape)
    cell_low, cell_high = _corners((box for box, _ in held), dims)
    want_low, want_high = _corners((box for box, _ in weights.wanted), dims)
    low = np.maximum(want_low[:, None], cell_low[None])
    high = np.minimum(want_high[:, None], cell_high[None])
    wanted, cell = np.nonzero((low < high).all(axis=2))
    low, high = low[wanted, cell], high[wanted, cell]
    covered = np.zeros(len(weights.wanted), dtype=np.int64)
    np.add.at(covered, wanted, (high - low).prod(axis=1))
    missing = np.flatnonzero(covered != (want_high - want_low).prod(axis=1))
    if len(missing):
        _refuse_uncovered(weights, *weights.wanted[missing[0]])
    boxes = tuple(tuple(zip(*corners, strict=True)) for corners in zip(low.tolist(), high.tolist(), strict=True))
    return boxes, cell, wanted


def _rows(wanted: Located, wanted_of_region: Ints) -> tuple[Ints, Ints]:
    """The destination and the region of each row."""
    ends = np.searchsorted(wanted_of_region, np.arange(len(wanted) + 1))
    destinations, regions = [], []
    for number, (_, ranks) in enumerate(wanted):
        own = np.arange(ends[number], ends[number + 1])
        destinations.append(np.repeat(np.asarray(ranks, dtype=np.int64), len(own)))
        regions.append(np.tile(own, len(ranks)))
    return np.concatenate(destinations), np.concatenate(regions)


def _candidates(destination: Ints, cell: Ints, held: Located, world: World, load: Ints) -> tuple[Ints, Ints, Ints]:
    """Each row's turn, where its candidates begin, and all candidates: the holders of its cell in the nearest tier.

    Tiers: the rank itself, its neighbours, its node, everybody. Rows that choose from the same holders take them in
    turn, beginning with the one that sends least so far.
    """
    most = max(len(ranks) for _, ranks in held)
    if most == 1:
        only = np.array([ranks[0] for _, ranks in held], dtype=np.int64)
        return np.zeros_like(destination), np.arange(len(destination) + 1), only[cell]
    holders = _by_load(held, most, load)[cell]
    safe = np.maximum(holders, 0)
    tier = np.full(holders.shape, 3, dtype=np.int8)
    tier[world.nodes[safe] == world.nodes[destination][:, None]] = 2
    tier[world.neighbours[safe] == world.neighbours[destination][:, None]] = 1
    tier[holders == destination[:, None]] = 0
    tier[holders < 0] = 4
    nearest = tier.min(axis=1)
    is_candidate = tier == nearest[:, None]
    first = np.concatenate(([0], np.cumsum(is_candidate.sum(axis=1))))
    nothing = np.zeros_like(destination)
    places = (destination, world.neighbours[destination], world.nodes[destination], nothing)
    key = (cell * 4 + nearest) * len(world.nodes) + np.choose(nearest, places)
    return _turns(key), first, holders[is_candidate]


def _by_load(held: Located, most: int, load: Ints) -> Ints:
    """A row of holders a cell, those that send least first, filled up with -1."""
    table = np.full((len(held), most), -1, dtype=np.int64)
    for number, (_, ranks) in enumerate(held):
        holders = np.asarray(ranks, dtype=np.int64)
        table[number, : len(ranks)] = holders[np.lexsort((holders, load[holders]))]
    return table


def _turns(keys: Ints) -> Ints:
    """The number of earlier rows with the same key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    turns = np.empty_like(keys)
    turns[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
    return turns


def _numbered(labels: Sequence[Hashable]) -> Ints:
    """Labels as numbers from 0."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels], dtype=np.int64)


def _corners(boxes: Iterable[Box], dims: int) -> tuple[Ints, Ints]:
    listed = list(boxes)
    corners = np.array(listed, dtype=np.int64).reshape(len(listed), dims, 2)
    return corners[..., 0], corners[..., 1]


def _refuse_uncovered(weights: WeightClass, box: Box, ranks: tuple[int, ...]) -> None:
    missing = uncovered(box, [held for held, _ in weights.held])[0]
    raise EngineError(
        f"Rank {ranks[0]} needs {box_text(box)} of '{weights.names[0]}' {list(weights.shape)},"
        f" and no rank holds {box_text(missing)} of it.",
        remedy="Load both engines from the same model.path; every trained weight must be held by some rank.",
    )
