"""The transfer plan: which rank sends which box of which weight to which rank. Made once; imports without torch.

Every wanted box is covered exactly once: preferably by the rank itself, then by its micro-data-parallel group, then by
its node, then by any rank; among equals, by the one that sends least. Ranks receive only weights that they do not hold.

    plan = make_plan(sources, destinations, neighbors=[0, 0, 1, 1])
    plan.received_by(2)    # pieces, in the order that all ranks use
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.parallel.boxes import Box
from hybridflow.resharding.holdings import Holding, Piece, Ranked, RankHoldings, ranked
from hybridflow.resharding.routes import Ints, Route, Topology, make_route
from hybridflow.resharding.weight_classes import classify

Chosen = Callable[[Ints, Ints], NDArray[np.bool_]]
"""Selects rows by their sources and destinations."""


class Gather(NamedTuple):
    """An all-gather: each of the ranks holds some of the pieces, and ends with all of them."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Each piece once, with its source as destination."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """The pieces that ranks send, receive and keep, always ordered by weight, then box, then destination.

    Weights with the same layout share one `Route`, which keeps the plan for a thousand ranks small; pieces are listed
    per rank, on demand.
    """

    sources: Ranked
    destinations: Ranked
    routes: tuple[Route, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.sources)

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, including those that stay on their rank; for small plans."""
        return _pieces((route, route.rows.all) for route in self.routes)

    def received_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank receives from others."""
        return self._listed(Route.rows_to, rank, lambda start, end: start != rank)

    def sent_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank sends to others."""
        return self._listed(Route.rows_from, rank, lambda start, end: (start == rank) & (end != rank))

    def kept_by(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank both holds and wants: copied within the rank, or already in place."""
        return self._listed(Route.rows_to, rank, lambda start, end: start == rank)

    def as_gathers(self, rank: int) -> tuple[list[Gather], list[Piece]]:
        """The all-gathers that a rank takes part in, and the pieces it sends or receives outside of them.

        In a nested layout these are the gathers of the micro-data-parallel groups. The remaining pieces are of weights
        that several ranks of a group hold already, such as norms, which a gather would send to them again.
        """
        gathered: dict[tuple[int, ...], list[tuple[Route, Ints]]] = defaultdict(list)
        left: list[tuple[Route, Ints]] = []
        for route in self.routes:
            rows = route.rows_about(rank)
            left.append((route, rows[~np.isin(route.rows.destinations(rows), route.gathering_ranks)]))
            for ranks, rows in route.gathered:
                if rank in ranks:
                    gathered[ranks].append((route, rows))
        gathers = [
            Gather(ranks, tuple(piece._replace(destination=piece.source) for piece in _pieces(selected)))
            for ranks, selected in gathered.items()
        ]
        return gathers, _pieces(left, lambda start, end: (start != end) & ((start == rank) | (end == rank)))

    def bytes_received(self, rank: int) -> int:
        """Bytes that a rank receives from others."""
        return int(self._received[rank])

    def bytes_sent(self, rank: int) -> int:
        """Bytes that a rank sends to others."""
        return int(self._sent[rank])

    def bytes_kept(self, rank: int) -> int:
        """Bytes that a rank both holds and wants."""
        return int(self._kept[rank])

    def _listed(self, rows_of: Callable[[Route, int], Ints], rank: int, chosen: Chosen) -> tuple[Piece, ...]:
        with _collector_paused():
            return tuple(_pieces(((route, rows_of(route, rank)) for route in self.routes), chosen))

    @cached_property
    def _received(self) -> Ints:
        return self._total(lambda route: route.bytes_by(size=self.size, by_source=False))

    @cached_property
    def _sent(self) -> Ints:
        return self._total(lambda route: route.bytes_by(size=self.size, by_source=True))

    @cached_property
    def _kept(self) -> Ints:
        return self._total(lambda route: route.bytes_by(size=self.size, by_source=True, is_moving=False))

    def _total(self, of_route: Callable[[Route], Ints]) -> Ints:
        return sum(map(of_route, self.routes), np.zeros(self.size, dtype=np.int64))


def make_plan(
    sources: Sequence[Sequence[Holding] | RankHoldings],
    destinations: Sequence[Sequence[Holding] | RankHoldings],
    *,
    nodes: Sequence[str] | None = None,
    neighbors: Sequence[int] | None = None,
) -> ReshardPlan:
    """The plan that gives each rank the weights it wants, from those that ranks hold.

    Ranks are numbered over all processes that take part: if trainers and rollouts are different processes, the former
    want nothing and the latter hold nothing. `nodes` are the names of the ranks' machines, `neighbors` the indices of
    their micro-data-parallel groups.
    """
    size = max(len(sources), len(destinations))
    held, wanted = (ranked([*lists, *[()] * (size - len(lists))]) for lists in (sources, destinations))
    for named in (nodes, neighbors):
        assert named is None or len(named) == size, f"{named} does not name {size} ranks"
    topology, load = Topology.of(size, nodes, neighbors), np.zeros(size, dtype=np.int64)
    routes = tuple(make_route(weights, topology, load) for weights in classify(held, wanted))
    return ReshardPlan(held, wanted, routes)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses garbage collection, which would traverse millions of new pieces again and again, and free none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _pieces(selected: Iterable[tuple[Route, Ints]], chosen: Chosen | None = None) -> list[Piece]:
    """The pieces of some rows of each route, filtered by source and destination, in plan order."""
    of_weight: list[tuple[int, list[Piece]]] = []
    for route, rows in selected:
        weights, ordered = route.weights, route.in_order(rows)
        boxes = [route.boxes[region] for region in route.rows.regions(ordered).tolist()]
        ends = _endpoints(route, ordered, boxes, 0, chosen)
        for number, (name, place) in enumerate(zip(weights.names, weights.places, strict=True)):
            if number and not route.is_fixed:
                ends = _endpoints(route, ordered, boxes, number, chosen)
            pieces = map(Piece._make, zip(repeat(name), *ends, repeat(weights.itemsize)))
            of_weight.append((place, list(pieces)))
    return [piece for _, pieces in sorted(of_weight, key=itemgetter(0)) for piece in pieces]


def _endpoints(
    route: Route, rows: Ints, boxes: list[Box], number: int, chosen: Chosen | None
) -> tuple[list[Box], list[int], list[int]]:
    """Boxes, sources and destinations of the chosen rows, for the `number`-th weight of the class."""
    sources, destinations = route.sources(rows, number), route.rows.destinations(rows)
    if chosen is None:
        return boxes, sources.tolist(), destinations.tolist()
    kept = np.flatnonzero(chosen(sources, destinations))
    return [boxes[row] for row in kept.tolist()], sources[kept].tolist(), destinations[kept].tolist()
