"""Where the weights of one class come from: the arithmetic of a plan, done once for all layers with the same layout.

The *cells* of a class are its source boxes (or their common refinement where they overlap), each with its holders. A
*region* is the intersection of a cell with a wanted box. A *row* is a region and a rank that wants it. The
*candidates* of a row are the holders nearest to that rank; the weights of the class use them in turn, so that a
thousand equal layers load all of them evenly. If every cell has one holder, a rank computes only its own rows.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import Box, are_disjoint, box_text, cells, contains, uncovered, volume
from hybridflow.resharding.weight_classes import Located, WeightClass

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Topology:
    """The micro-data-parallel group (`neighbors`) and the node of each rank, as numbers."""

    neighbors: Ints
    nodes: Ints

    @staticmethod
    def of(size: int, nodes: Sequence[str] | None, neighbors: Sequence[int] | None) -> "Topology":
        """Without `neighbors`, each rank is in a group of its own; without `nodes`, all ranks share one node."""
        return Topology(
            neighbors=np.arange(size) if neighbors is None else _numbered(neighbors),
            nodes=np.zeros(size, dtype=np.int64) if nodes is None else _numbered(nodes),
        )


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a class, numbered by wanted box, then by the rank that wants it, then by region.

    The meaning of a row number is computed on demand: thousands of shards have millions of rows, of which a rank needs
    only its own. A *request* is a wanted box and a rank that wants it.
    """

    box: Ints
    """Wanted box of each region, ascending."""

    wanted: Ints
    """Wanted box of each request, ascending."""

    ranks: Ints
    """Rank of each request."""

    @cached_property
    def regions_of_box(self) -> tuple[Ints, Ints]:
        """First region of each wanted box, and the number of its regions."""
        numbers = np.arange(self.wanted[-1] + 1 if len(self.wanted) else 0)
        first = np.searchsorted(self.box, numbers)
        return first, np.searchsorted(self.box, numbers, side="right") - first

    @cached_property
    def first(self) -> Ints:
        """First row of each request; the total number of rows at the end."""
        return np.concatenate(([0], np.cumsum(self.regions_of_box[1][self.wanted])))

    @property
    def all(self) -> Ints:
        """Every row."""
        return np.arange(self.first[-1])

    def regions(self, rows: Ints) -> Ints:
        """The region of each row."""
        request = self._request(rows)
        return self.regions_of_box[0][self.wanted[request]] + rows - self.first[request]

    def destinations(self, rows: Ints) -> Ints:
        """The rank that wants each row."""
        return self.ranks[self._request(rows)]

    def to(self, rank: int) -> Ints:
        """The rows that a rank wants."""
        requests = np.flatnonzero(self.ranks == rank)
        return _ranges(self.first[requests], self.first[requests + 1])

    def about(self, regions: Ints) -> Ints:
        """The rows of some regions, for all ranks that want them."""
        first, _ = self.regions_of_box
        boxes = self.box[regions]
        low, high = (np.searchsorted(self.wanted, boxes, side=side) for side in ("left", "right"))
        inside = np.repeat(regions - first[boxes], high - low)
        return np.sort(self.first[_ranges(low, high)] + inside)

    def _request(self, rows: Ints) -> Ints:
        return np.searchsorted(self.first, rows, side="right") - 1


@dataclass(frozen=True, eq=False)
class Choices:
    """Candidates per row: row i of the class's k-th weight comes from candidate (turn[i] + k) modulo their number."""

    turn: Ints
    first: Ints
    """Index of each row's first candidate in `candidates`; one more at the end."""

    candidates: Ints


@dataclass(frozen=True, eq=False)
class Route:
    """The rows of one class and their sources: the holder of the region, or one of several candidates."""

    weights: WeightClass
    boxes: tuple[Box, ...]
    """Box of each region."""

    nbytes: Ints
    """Bytes of each region."""

    rows: Rows
    holder: Ints | None
    """Rank that holds each region, if each has one holder."""

    choices: Choices | None
    """The candidates, if some regions have several holders."""

    @property
    def is_fixed(self) -> bool:
        """Whether every row has one candidate, so that all weights of the class have the same sources."""
        return self.choices is None or len(self.choices.candidates) == len(self.choices.turn)

    def sources(self, rows: Ints, number: int) -> Ints:
        """The source of each row, for the `number`-th weight of the class."""
        if self.holder is not None:
            return self.holder[self.rows.regions(rows)]
        turn, first, candidates = self._choices
        return candidates[first[rows] + (turn[rows] + number) % (first[rows + 1] - first[rows])]

    def rows_to(self, rank: int) -> Ints:
        """The rows that a rank wants."""
        return self.rows.to(rank)

    def rows_from(self, rank: int) -> Ints:
        """The rows that a rank is a candidate for."""
        if self.holder is not None:
            return self.rows.about(np.flatnonzero(self.holder == rank))
        _, first, candidates = self._choices
        return np.unique(np.searchsorted(first, np.flatnonzero(candidates == rank), side="right") - 1)

    def rows_about(self, rank: int) -> Ints:
        """The rows that a rank wants or is a candidate for."""
        return np.union1d(self.rows_to(rank), self.rows_from(rank))

    def in_order(self, rows: Ints) -> Ints:
        """The rows, sorted by box, then by destination."""
        return rows[np.lexsort((self.rows.destinations(rows), self.region_order[self.rows.regions(rows)]))]

    @cached_property
    def gathered(self) -> tuple[tuple[tuple[int, ...], Ints], ...]:
        """Groups of ranks that can all-gather, each with the rows of its first rank, which stand for all of them.

        Such ranks want the same regions from the same sources, all of which are in the group.
        """
        order = np.argsort(self.rows.ranks, kind="stable")
        ranks, first = np.unique(self.rows.ranks[order], return_index=True)
        same_boxes: dict[bytes, list[int]] = defaultdict(list)
        for rank, requests in zip(ranks.tolist(), np.split(order, first[1:]), strict=True):
            same_boxes[self.rows.wanted[requests].tobytes()].append(rank)
        groups: dict[tuple[bytes, bytes], list[int]] = defaultdict(list)
        for boxes, several in same_boxes.items():
            for rank in several if self.holder is None else several[:1]:
                sources = self._only_sources(self.rows_to(rank))
                if sources is not None:
                    groups[boxes, sources.tobytes()] += [rank] if self.holder is None else several
        found = []
        for members in sorted(groups.values()):
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
        """Position of each region's box in the sorted, distinct boxes."""
        places = {box: place for place, box in enumerate(sorted(set(self.boxes)))}
        return np.array([places[box] for box in self.boxes], dtype=np.int64)

    def bytes_by(self, *, size: int, by_source: bool, is_moving: bool = True) -> Ints:
        """Bytes that move between `size` ranks, or that stay on them, summed by source or by destination."""
        if self.holder is not None:
            return self._bytes_of_holders(self.holder, size, by_source, is_moving)
        turn, first, candidates = self._choices
        counts = np.diff(first)
        row = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(candidates)) - first[row]
        number = (place - turn[row]) % counts[row]  # the first weight that comes from this candidate
        weights = (len(self.weights.names) - number + counts[row] - 1) // counts[row]
        destination = self.rows.destinations(row)
        nbytes = self.nbytes[self.rows.regions(row)] * weights * ((candidates != destination) == is_moving)
        return _sums(candidates if by_source else destination, nbytes, size)

    def _bytes_of_holders(self, holder: Ints, size: int, by_source: bool, is_moving: bool) -> Ints:
        """`bytes_by` without listing rows: a region stays on its holder if wanted there, and goes to all others."""
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
        """The sources of the rows, if each has one candidate, else None."""
        if self.choices is not None and (np.diff(self.choices.first)[rows] != 1).any():
            return None
        return self.sources(rows, 0)

    @property
    def _choices(self) -> tuple[Ints, Ints, Ints]:
        assert self.choices is not None, "regions have one holder, or several"
        return self.choices.turn, self.choices.first, self.choices.candidates


def make_route(weights: WeightClass, topology: Topology, load: Ints) -> Route:
    """The route of a class. Prefers the ranks with the least `load`, the bytes that each sends, and updates it."""
    held = _disjoint(weights.held)
    boxes, cell, box = _regions(weights, held)
    counts = [len(ranks) for _, ranks in weights.wanted]
    ranks = np.array([rank for _, own in weights.wanted for rank in own], dtype=np.int64)
    rows = Rows(box, np.repeat(np.arange(len(counts)), counts), ranks)
    most = max(len(ranks) for _, ranks in held)
    holder = np.array([ranks[0] for _, ranks in held], dtype=np.int64)[cell] if most == 1 else None
    choices = None if most == 1 else _choices(rows, cell, _by_load(held, most, load), topology)
    volumes = np.array([volume(box) for box in boxes], dtype=np.int64)
    route = Route(weights, boxes, volumes * weights.itemsize, rows, holder, choices)
    load += route.bytes_by(size=len(load), by_source=True)
    return route


def _disjoint(held: Located) -> Located:
    """Disjoint boxes, each with all ranks that hold it."""
    boxes = [box for box, _ in held]
    if are_disjoint(boxes):
        return held
    return tuple(
        (cell, tuple(sorted({rank for box, ranks in held if contains(box, cell) for rank in ranks})))
        for cell in cells(boxes)
    )


def _regions(weights: WeightClass, held: Located) -> tuple[tuple[Box, ...], Ints, Ints]:
    """The box of each region, its cell, and its wanted box; in ascending order of wanted boxes."""
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


def _choices(rows: Rows, cell: Ints, holders_of_cell: Ints, topology: Topology) -> Choices:
    """Each row's turn and its candidates: the holders of its cell in the nearest tier.

    Tiers: the rank itself, its neighbors, its node, all ranks. Rows with the same candidates take them in turn,
    starting with the one that sends least so far.
    """
    every = rows.all
    destination, cell = rows.destinations(every), cell[rows.regions(every)]
    holders = holders_of_cell[cell]
    safe = np.maximum(holders, 0)
    tier = np.full(holders.shape, 3, dtype=np.int8)
    tier[topology.nodes[safe] == topology.nodes[destination][:, None]] = 2
    tier[topology.neighbors[safe] == topology.neighbors[destination][:, None]] = 1
    tier[holders == destination[:, None]] = 0
    tier[holders < 0] = 4
    nearest = tier.min(axis=1)
    is_candidate = tier == nearest[:, None]
    first = np.concatenate(([0], np.cumsum(is_candidate.sum(axis=1))))
    nothing = np.zeros_like(destination)
    places = (destination, topology.neighbors[destination], topology.nodes[destination], nothing)
    key = (cell * 4 + nearest) * len(topology.nodes) + np.choose(nearest, places)
    return Choices(_turns(key), first, holders[is_candidate])


def _by_load(held: Located, most: int, load: Ints) -> Ints:
    """A table of each cell's holders, those that send least first, padded with -1."""
    table = np.full((len(held), most), -1, dtype=np.int64)
    for number, (_, ranks) in enumerate(held):
        holders = np.asarray(ranks, dtype=np.int64)
        table[number, : len(ranks)] = holders[np.lexsort((holders, load[holders]))]
    return table


def _turns(keys: Ints) -> Ints:
    """For each key, the number of earlier equal keys."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    turns = np.empty_like(keys)
    turns[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered)
    return turns


def _ranges(low: Ints, high: Ints) -> Ints:
    """The concatenation of several half-open ranges."""
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
        f" but no rank holds {box_text(missing)} of it.",
        remedy="Load both engines from the same model.path; every trained weight must be held by some rank.",
    )
