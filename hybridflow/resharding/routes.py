"""The routes of weights with the same layout: the arithmetic of a plan, done once for all layers of a model.

A *class* is a set of weights with the same layout: same shape, same boxes on the same ranks. The cells of a class are
its source boxes (or their common refinement where they overlap), each with its holders; a *region* is a cell inside a
box that is wanted; a *row* is a region and a rank that wants it. A row has one or more candidates, the holders nearest
to the rank, and takes them in turn from weight to weight, so that a thousand equal layers load all of them alike. Where
every cell has one holder there is nothing to choose, and a rank lists its own rows alone.
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
    """Weights with the same layout: `names`, and `places`, their indices in the order of all weights."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    held: Located
    wanted: Located


@dataclass(frozen=True, eq=False)
class World:
    """The neighbourhood and the node of each rank, as numbers."""

    neighbours: Ints
    nodes: Ints

    @staticmethod
    def of(size: int, nodes: Sequence[str] | None, neighbours: Sequence[int] | None) -> "World":
        """Without `neighbours` each rank is alone; without `nodes` all are on one node."""
        return World(
            neighbours=np.arange(size) if neighbours is None else _numbered(neighbours),
            nodes=np.zeros(size, dtype=np.int64) if nodes is None else _numbered(nodes),
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a class: for each wanted box, for each rank that wants it, its regions in order.

    Rows are integers, and their meaning is computed on demand: thousands of shards have millions of rows, of which a
    rank needs only its own.
    """

    box: Ints
    """Of each region: the number of the wanted box that it is part of, ascending."""

    wanted: Ints
    """For each wish: the number of a wanted box, ascending, ..."""

    ranks: Ints
    """... and a rank that wants it."""

    @cached_property
    def regions_of_box(self) -> tuple[Ints, Ints]:
        """The first region of each wanted box, and how many there are."""
        numbers = np.arange(self.wanted[-1] + 1 if len(self.wanted) else 0)
        first = np.searchsorted(self.box, numbers)
        return first, np.searchsorted(self.box, numbers, side="right") - first

    @cached_property
    def first(self) -> Ints:
        """The first row of each wish, and the number of all rows at the end."""
        return np.concatenate(([0], np.cumsum(self.regions_of_box[1][self.wanted])))

    @property
    def all(self) -> Ints:
        """Every row."""
        return np.arange(self.first[-1])

    def regions(self, rows: Ints) -> Ints:
        """The region of each of some rows."""
        wish = self._wish(rows)
        return self.regions_of_box[0][self.wanted[wish]] + rows - self.first[wish]

    def destinations(self, rows: Ints) -> Ints:
        """The rank that wants each of some rows."""
        return self.ranks[self._wish(rows)]

    def to(self, rank: int) -> Ints:
        """The rows of what a rank wants."""
        wishes = np.flatnonzero(self.ranks == rank)
        return _ranges(self.first[wishes], self.first[wishes + 1])

    def about(self, regions: Ints) -> Ints:
        """The rows of some regions, for all ranks that want them."""
        first, _ = self.regions_of_box
        boxes = self.box[regions]
        low, high = (np.searchsorted(self.wanted, boxes, side=side) for side in ("left", "right"))
        inside = np.repeat(regions - first[boxes], high - low)
        return np.sort(self.first[_ranges(low, high)] + inside)

    def _wish(self, rows: Ints) -> Ints:
        return np.searchsorted(self.first, rows, side="right") - 1


@dataclass(frozen=True, eq=False)
class Choices:
    """Of rows that several ranks could send: row i of the class's k-th weight comes from candidate (turn[i] + k)."""

    turn: Ints
    first: Ints
    """Where a row's candidates begin in `candidates`; one more at the end."""

    candidates: Ints


@dataclass(frozen=True, eq=False)
class Route:
    """The rows of one class, and where each comes from: the one rank that holds its region, or one of several."""

    weights: WeightClass
    boxes: tuple[Box, ...]
    """Of the regions."""

    nbytes: Ints
    """Of the regions."""

    rows: Rows
    holder: Ints | None
    """Of each region, where each has one holder."""

    choices: Choices | None
    """Where regions have several."""

    @property
    def is_fixed(self) -> bool:
        """Every row has one candidate, so that all weights of the class travel alike."""
        return self.choices is None or len(self.choices.candidates) == len(self.choices.turn)

    def sources(self, rows: Ints, number: int) -> Ints:
        """The sources of some rows for the `number`-th weight of the class."""
        if self.holder is not None:
            return self.holder[self.rows.regions(rows)]
        turn, first, candidates = self._choices
        return candidates[first[rows] + (turn[rows] + number) % (first[rows + 1] - first[rows])]

    def rows_to(self, rank: int) -> Ints:
        """The rows of what a rank wants."""
        return self.rows.to(rank)

    def rows_from(self, rank: int) -> Ints:
        """The rows of what a rank is a candidate for."""
        if self.holder is not None:
            return self.rows.about(np.flatnonzero(self.holder == rank))
        _, first, candidates = self._choices
        return np.unique(np.searchsorted(first, np.flatnonzero(candidates == rank), side="right") - 1)

    def rows_about(self, rank: int) -> Ints:
        """The rows of what a rank wants, or is a candidate for."""
        return np.union1d(self.rows_to(rank), self.rows_from(rank))

    def in_order(self, rows: Ints) -> Ints:
        """The rows by box, then by destination."""
        return rows[np.lexsort((self.rows.destinations(rows), self.region_order[self.rows.regions(rows)]))]

    @cached_property
    def gathered(self) -> tuple[tuple[tuple[int, ...], Ints], ...]:
        """The groups of ranks that exchange everything: each with the rows of its first rank, which say it all.

        Such ranks want the same regions from the same sources, all of which are among themselves.
        """
        order = np.argsort(self.rows.ranks, kind="stable")
        ranks, first = np.unique(self.rows.ranks[order], return_index=True)
        same_boxes: dict[bytes, list[int]] = defaultdict(list)
        for rank, wishes in zip(ranks.tolist(), np.split(order, first[1:]), strict=True):
            same_boxes[self.rows.wanted[wishes].tobytes()].append(rank)
        alike: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
        for boxes, several in same_boxes.items():
            for rank in several if self.holder is None else several[:1]:
                sources = self._only_sources(self.rows_to(rank))
                if sources is not None:
                    alike[boxes, sources.tobytes()] += [rank] if self.holder is None else several
        found = []
        for members in sorted(alike.values()):
            rows = self.rows_to(members[0])
            if len(members) > 1 and np.isin(self.sources(rows, 0), members).all():
                found.append((tuple(members), rows))
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
        if self.holder is not None:
            rows = self.rows.all
            return rows, self.sources(rows, 0), np.full_like(rows, len(self.weights.names))
        turn, first, candidates = self._choices
        counts = np.diff(first)
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(candidates)) - first[row]
        number = (place - turn[row]) % counts[row]  # the first weight that comes from this candidate
        return row, candidates, (len(self.weights.names) - number + counts[row] - 1) // counts[row]

    def bytes_by(self, *, size: int, by_source: bool, is_moving: bool = True) -> Ints:
        """Bytes that move between `size` ranks, or that stay, by the rank that holds them or by the one that wants."""
        if self.holder is not None:
            return self._bytes_of_holders(self.holder, size, by_source, is_moving)
        row, source, weights = self.entries()
        destination = self.rows.destinations(row)
        nbytes = self.nbytes[self.rows.regions(row)] * weights * ((source != destination) == is_moving)
        return _sums(source if by_source else destination, nbytes, size)

    def _bytes_of_holders(self, holder: Ints, size: int, by_source: bool, is_moving: bool) -> Ints:
        """The same without listing rows: each region stays on its holder if that wants it, and goes to all others."""
        box, wanted, ranks = self.rows.box, self.rows.wanted, self.rows.ranks
        nbytes = self.nbytes * len(self.weights.names)
        stays = np.isin(box * size + holder, wanted * size + ranks)
        kept = _sums(holder, nbytes * stays, size)
        if not is_moving:
            return kept
        if by_source:
            return _sums(holder, nbytes * (np.bincount(wanted, minlength=box.max(initial=-1) + 1)[box] - stays), size)
        return _sums(ranks, _sums(box, nbytes, wanted.max(initial=-1) + 1)[wanted], size) - kept

    def _only_sources(self, rows: Ints) -> Ints | None:
        """The sources of rows of which each has one candidate; None where one has several."""
        if self.choices is not None and (np.diff(self.choices.first)[rows] != 1).any():
            return None
        return self.sources(rows, 0)

    @property
    def _choices(self) -> tuple[Ints, Ints, Ints]:
        assert self.choices is not None, "regions have one holder, or several"
        return self.choices.turn, self.choices.first, self.choices.candidates


def make_route(weights: WeightClass, world: World, load: Ints) -> Route:
    """The rows of a class; `load`, the bytes each rank sends so far, says which candidates come first, and grows."""
    held = _disjoint(weights.held)
    boxes, cell, box = _regions(weights, held)
    counts = [len(ranks) for _, ranks in weights.wanted]
    ranks = np.array([rank for _, own in weights.wanted for rank in own], dtype=np.int64)
    rows = Rows(box, np.repeat(np.arange(len(counts)), counts), ranks)
    most = max(len(ranks) for _, ranks in held)
    holder = np.array([ranks[0] for _, ranks in held], dtype=np.int64)[cell] if most == 1 else None
    choices = None if most == 1 else _choices(rows, cell, _by_load(held, most, load), world)
    volumes = np.array([volume(box) for box in boxes], dtype=np.int64)
    route = Route(weights, boxes, volumes * weights.itemsize, rows, holder, choices)
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


def _choices(rows: Rows, cell: Ints, holders_of_cell: Ints, world: World) -> Choices:
    """Each row's turn and its candidates: the holders of its cell in the nearest tier.

    Tiers: the rank itself, its neighbours, its node, everybody. Rows that choose from the same holders take them in
    turn, beginning with the one that sends least so far.
    """
    every = rows.all
    destination, cell = rows.destinations(every), cell[rows.regions(every)]
    holders = holders_of_cell[cell]
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
    return Choices(_turns(key), first, holders[is_candidate])


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


def _ranges(low: Ints, high: Ints) -> Ints:
    """All numbers of several half-open ranges, one range after the other."""
    counts = high - low
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(low - ends + counts, counts)


def _sums(places: Ints, amounts: Ints, size: int) -> Ints:
    """The sum of the amounts at each place. bincount adds in float64: exact below 2 ** 53, and faster than add.at."""
    return np.bincount(places, amounts, size).astype(np.int64)


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
