"""Who sends which box of which weight to whom, made once from what every rank holds and wants. Imports without torch.

Every box that is wanted is covered exactly once: from the rank itself first, then from its micro-data-parallel group,
then from its node, then from the rank that sends least so far. So a rank receives what it does not hold, and no more.

    plan = make_plan(sources, destinations, neighbours=[0, 0, 1, 1])
    plan.received_by(2)    # pieces, in the order in which every rank handles them
"""

import gc
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridflow.parallel.boxes import uncovered, volume
from hybridflow.parallel.layout import Box
from hybridflow.resharding.classes import classify
from hybridflow.resharding.holdings import Holding, Piece
from hybridflow.resharding.rosters import NOTHING, Ranked, RankHoldings, ranked
from hybridflow.resharding.routes import Ints, Route, World, make_route

Bools = NDArray[np.bool_]


class Gather(NamedTuple):
    """Ranks that give one another everything: each has some of the pieces, and ends with all of them."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """Each piece once, from its source to itself."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Pieces of weights and their ways. Pieces come in one order everywhere: by weight, by box, by destination.

    All weights that lie alike share one `Route`, so that a plan for a thousand ranks is small, and a rank asks for its
    own pieces.
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
        """All pieces, those that stay included; for plans small enough to list."""
        return _pieces((route, route.rows.all) for route in self.routes)

    def received_by(self, rank: int) -> tuple[Piece, ...]:
        """What comes to a rank from others."""
        return self._own("received", rank)

    def sent_by(self, rank: int) -> tuple[Piece, ...]:
        """What goes from a rank to others."""
        return self._own("sent", rank)

    def kept_by(self, rank: int) -> tuple[Piece, ...]:
        """What a rank wants and holds itself: copied within the rank, or already in its place."""
        return self._own("kept", rank)

    def as_gathers(self, rank: int | None = None) -> tuple[list[Gather], list[Piece]]:
        """The plan as all-gathers, and the pieces that move and are in none of them; of all ranks, or of one.

        In a nested layout the gathers are those of the micro-data-parallel groups. What is left then are weights that
        several ranks of a group hold already (norms), so that a gather would bring it to them again.
        """
        gathered: dict[tuple[int, ...], list[tuple[Route, Ints]]] = defaultdict(list)
        left: list[tuple[Route, Ints]] = []
        for route in self.routes:
            rows = route.rows.all if rank is None else route.rows_about(rank)
            left.append((route, rows[~np.isin(route.rows.destinations(rows), route.gathering_ranks)]))
            for ranks, rows in route.gathered:
                if rank is None or rank in ranks:
                    gathered[ranks].append((route, rows))
        gathers = [
            Gather(ranks, tuple(piece._replace(destination=piece.source) for piece in _pieces(selected)))
            for ranks, selected in gathered.items()
        ]
        concerns = _moves if rank is None else lambda start, end: _moves(start, end) & ((start == rank) | (end == rank))
        return gathers, _pieces(left, concerns)

    def bytes_received(self, rank: int) -> int:
        """Bytes that come to a rank from others."""
        return int(self._received[rank])

    def bytes_sent(self, rank: int) -> int:
        """Bytes that go from a rank to others."""
        return int(self._sent[rank])

    def bytes_kept(self, rank: int) -> int:
        """Bytes of what a rank wants and holds itself."""
        return int(self._kept[rank])

    def lower_bound(self, rank: int) -> int:
        """Bytes of what a rank wants and does not hold: no plan can move fewer to it."""
        own: dict[str, list[Box]] = defaultdict(list)
        for held in self.sources[rank]:
            own[held.name].append(held.box)
        return sum(
            volume(box) * wanted.itemsize
            for wanted in self.destinations[rank]
            for box in uncovered(wanted.box, own[wanted.name])
        )

    def describe(self, most_ranks: int = 16) -> str:
        """A table for people: what each rank wants, and where it comes from."""
        moved, held = int(self._received.sum()), sum(len(route.weights.names) for route in self.routes)
        lines = [
            f"{held} weights in {len(self.routes)} layouts, {self.size} ranks: {_megabytes(moved)} MB move",
            f"{'rank':>6}{'wants':>12}{'keeps':>12}{'receives':>12}{'at least':>12}{'sends':>12}   MB",
        ]
        for rank in range(min(self.size, most_ranks)):
            kept, received = self.bytes_kept(rank), self.bytes_received(rank)
            numbers = (kept + received, kept, received, self.lower_bound(rank), self.bytes_sent(rank))
            lines.append(f"{rank:>6}" + "".join(f"{_megabytes(number):>12}" for number in numbers))
        if self.size > most_ranks:
            lines.append(f"{'...':>6} and {self.size - most_ranks} more")
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """The same on two ranks exactly where their plans are the same."""
        digest = hashlib.sha256(repr(self.size).encode())
        for route in self.routes:
            digest.update(repr((route.weights, route.boxes)).encode())
            choices = route.choices
            for numbers in (choices.turn, choices.first, choices.candidates) if choices else ():
                digest.update(numbers.tobytes())
        return digest.hexdigest()[:16]

    def _own(self, part: Literal["received", "sent", "kept"], rank: int) -> tuple[Piece, ...]:
        """A part of a rank's pieces, listed once: it is asked for at every transfer."""
        if (part, rank) not in self._listed:
            rows_of = Route.rows_from if part == "sent" else Route.rows_to
            selected = ((route, rows_of(route, rank)) for route in self.routes)
            with _collector_paused():
                self._listed[part, rank] = tuple(_pieces(selected, _OWN[part](rank)))
        return self._listed[part, rank]

    @cached_property
    def _listed(self) -> dict[tuple[str, int], tuple[Piece, ...]]:
        return {}

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
    neighbours: Sequence[int] | None = None,
) -> ReshardPlan:
    """The plan from what each rank holds to what each rank wants; the same arguments give the same object.

    Ranks are numbered over all processes that take part: where trainers and rollouts are different processes, the ones
    want nothing and the others hold nothing. `nodes` names each rank's machine, `neighbours` numbers its
    micro-data-parallel group.
    """
    return _plan(
        ranked(sources),
        ranked(destinations),
        None if nodes is None else tuple(nodes),
        None if neighbours is None else tuple(neighbours),
    )


def forget_plans() -> None:
    """Empties the cache of plans, which hold on to what every rank holds and wants."""
    _plan.cache_clear()


@lru_cache(maxsize=4)
def _plan(
    sources: Ranked, destinations: Ranked, nodes: tuple[str, ...] | None, neighbours: tuple[int, ...] | None
) -> ReshardPlan:
    size = max(len(sources), len(destinations))
    sources += (NOTHING,) * (size - len(sources))
    destinations += (NOTHING,) * (size - len(destinations))
    for named in (nodes, neighbours):
        assert named is None or len(named) == size, f"{named} does not name {size} ranks"
    world, load = World.of(size, nodes, neighbours), np.zeros(size, dtype=np.int64)
    routes = tuple(make_route(weights, world, load) for weights in classify(sources, destinations))
    return ReshardPlan(sources, destinations, routes)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's search for cycles: it goes through millions of new pieces again and again, and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.3f}" if nbytes < 1e8 else f"{nbytes / 1e6:,.0f}"


def _moves(start: Ints, end: Ints) -> Bools:
    return start != end


_OWN: dict[str, Callable[[int], Callable[[Ints, Ints], Bools]]] = {
    "received": lambda rank: lambda start, end: start != rank,
    "sent": lambda rank: lambda start, end: (start == rank) & (end != rank),
    "kept": lambda rank: lambda start, end: start == rank,
}
"""Which (sources, destinations) are a part of a rank's rows."""


def _pieces(selected: Iterable[tuple[Route, Ints]], chosen: Callable[[Ints, Ints], Bools] | None = None) -> list[Piece]:
    """The pieces of some rows of each route, all or those of chosen (sources, destinations), in a plan's order."""
    of_weight: list[tuple[int, list[Piece]]] = []
    for route, rows in selected:
        weights, ordered = route.weights, route.in_order(rows)
        boxes = [route.boxes[region] for region in route.rows.regions(ordered).tolist()]
        ways = _ways(route, ordered, boxes, 0, chosen)
        for number, (name, place) in enumerate(zip(weights.names, weights.places, strict=True)):
            if number and not route.is_fixed:
                ways = _ways(route, ordered, boxes, number, chosen)
            pieces = map(Piece._make, zip(repeat(name), *ways, repeat(weights.itemsize)))
            of_weight.append((place, list(pieces)))
    return [piece for _, pieces in sorted(of_weight, key=itemgetter(0)) for piece in pieces]


def _ways(
    route: Route, rows: Ints, boxes: list[Box], number: int, chosen: Callable[[Ints, Ints], Bools] | None
) -> tuple[list[Box], list[int], list[int]]:
    """Box, source and destination of the chosen rows, for the `number`-th weight of the class."""
    sources, destinations = route.sources(rows, number), route.rows.destinations(rows)
    if chosen is None:
        return boxes, sources.tolist(), destinations.tolist()
    kept = np.flatnonzero(chosen(sources, destinations))
    return [boxes[row] for row in kept.tolist()], sources[kept].tolist(), destinations[kept].tolist()
