"""The options of units and of pools as arrays, without those that no plan needs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from hybridflow.errors import HybridflowError
from hybridflow.mapping.operations import Option
from hybridflow.mapping.partitions import Unit


class MemoryLimit(NamedTuple):
    """The memory per device that the roles of a pool can take together."""

    device_bytes: float
    host_bytes: float = np.inf
    """In the memory of the node."""

    def holds(self, device_bytes: float, host_bytes: float) -> bool:
        """Whether so many bytes fit."""
        return device_bytes <= self.device_bytes and host_bytes <= self.host_bytes

    def held(self, device_bytes: np.ndarray, host_bytes: np.ndarray) -> np.ndarray:
        """Which of these fit."""
        return (device_bytes <= self.device_bytes) & (host_bytes <= self.host_bytes)


class UnitTable:
    """The options of a unit on each number of devices, without those that another is no worse than in every respect.

    All options are in one array, ordered by devices: those of `sizes[z]` begin at `starts[z]`.
    """

    def __init__(
        self,
        unit: Unit,
        positions: Sequence[int],
        sizes: Sequence[int],
        options: Sequence[Sequence[Option]],
        limit: MemoryLimit,
    ) -> None:
        """Takes the positions of its operations in the step, and its options on each of the sizes."""
        self.positions = np.array(positions, dtype=int)
        self.options: list[Option] = []
        found = [np.zeros((0, len(positions) + 3))]
        counts = []
        for size, own in zip(sizes, options, strict=True):
            numbers = _numbers(unit, size, own, len(positions))
            fits = np.flatnonzero(limit.held(numbers[:, -3] + numbers[:, -2], numbers[:, -1]))
            kept = fits[undominated(numbers[fits])]
            counts.append(len(kept))
            found.append(numbers[kept])
            self.options.extend(own[index] for index in kept)
        numbers = np.concatenate(found)
        self.seconds, self.resident, self.extra, self.host = numbers[:, :-3], *numbers[:, -3:].T
        self.counts = np.array(counts, dtype=int)
        self.starts = np.cumsum(self.counts) - self.counts
        self.least_resident = self.least_per_size(self.resident)
        self.least_extra = self.least_per_size(self.extra)
        self.least_host = self.least_per_size(self.host)

    def least_per_size(self, values: np.ndarray) -> np.ndarray:
        """The least value among the options of each size; infinite without options."""
        found = np.full((len(self.counts), *values.shape[1:]), np.inf)
        if len(values):
            has_options = self.counts > 0
            found[has_options] = np.minimum.reduceat(values, self.starts[has_options])
        return found

    def rows(self, size_index: int) -> slice:
        """The options of a size."""
        start = self.starts[size_index]
        return slice(start, start + self.counts[size_index])


class Combinations(NamedTuple):
    """Options of all units of a pool on one size that fit in memory together."""

    lengths: np.ndarray
    """[combinations, chains] seconds that they add to each chain."""

    rows: np.ndarray
    """[combinations, units] rows of the units' tables."""


class PoolTable:
    """The units of a pool: lower bounds of what they add to chains on each size, and their combinations on one size.

    A chain is a vector of weights per operation; what a unit adds to it is the weighted sum of its seconds.
    """

    def __init__(self, units: Sequence[UnitTable], limit: MemoryLimit) -> None:
        self.units = units
        self.limit = limit
        self._bounds: dict[tuple[int, bytes], np.ndarray] = {}
        self._usable = [self._usable_rows(unit) for unit in units]

    def bounds(self, weights: np.ndarray) -> np.ndarray:
        """[sizes, chains] the least that the pool adds to each chain of `weights` [chains, operations].

        Each unit has its best option for each chain, among those that fit next to the smallest options of the others.
        """
        total = 0.0
        for number, unit in enumerate(self.units):
            columns = []
            for row in weights[:, unit.positions]:
                key = number, row.tobytes()
                if key not in self._bounds:
                    seconds = np.where(self._usable[number], unit.seconds @ row, np.inf)
                    self._bounds[key] = unit.least_per_size(seconds)
                columns.append(self._bounds[key])
            total = total + np.stack(columns, axis=1)
        return np.asarray(total)

    def combinations(
        self, size_index: int, weights: np.ndarray, room: np.ndarray, width: int | None = None
    ) -> Combinations:
        """The combinations on a size that add at most `room` to each chain, without those that no plan needs.

        The last chain is not limited: it holds all operations. With a width, only about this many of the shortest.
        """
        added = [unit.seconds[unit.rows(size_index)] @ weights[:, unit.positions].T for unit in self.units]
        if not all(map(len, added)):
            return Combinations(np.zeros((0, len(weights))), np.zeros((0, len(self.units)), dtype=int))
        rest = np.cumsum([each.min(axis=0) for each in added[::-1]], axis=0)[::-1]
        rest = np.concatenate([rest, np.zeros((1, len(weights)))])
        completion = Completion([(unit.resident[rows], unit.extra[rows]) for unit, rows in self._rows(size_index)])
        host_left = np.cumsum([0.0, *(unit.least_host[size_index] for unit in self.units[:0:-1])])[::-1]
        lengths = np.zeros((1, len(weights)))
        memory = np.zeros((1, 3))
        picks = np.zeros((1, 0), dtype=int)
        for number, (unit, rows) in enumerate(self._rows(size_index)):
            grown = (lengths[:, None] + added[number][None]).reshape(-1, len(weights))
            resident = (memory[:, None, 0] + unit.resident[rows][None]).ravel()
            extra = np.maximum(memory[:, None, 1], unit.extra[rows][None]).ravel()
            host = (memory[:, None, 2] + unit.host[rows][None]).ravel()
            is_kept = ((grown + rest[number + 1])[:, :-1] <= room[:-1]).all(axis=1)
            least = resident + completion.least_bytes(number + 1, extra)
            is_kept &= self.limit.held(least, host + host_left[number])
            kept = np.flatnonzero(is_kept)
            if width is not None and len(kept) > width:
                over = (grown[kept] + rest[number + 1] - np.where(np.isfinite(room), room, 0.0))[:, :-1].max(axis=1)
                kept = kept[np.lexsort((grown[kept, -1], over))[:width]]
            needs = np.stack([resident[kept], extra[kept], host[kept]], axis=1)
            is_last = number + 1 == len(self.units)
            best = undominated(grown[kept] if is_last else np.concatenate([grown[kept], needs], axis=1))
            kept, memory = kept[best], needs[best]
            lengths = grown[kept]
            before, own = np.divmod(kept, rows.stop - rows.start)
            picks = np.concatenate([picks[before], (own + rows.start)[:, None]], axis=1)
        return Combinations(lengths, picks)

    def _rows(self, size_index: int) -> Iterable[tuple[UnitTable, slice]]:
        return ((unit, unit.rows(size_index)) for unit in self.units)

    def _usable_rows(self, unit: UnitTable) -> np.ndarray:
        """Whether each option of a unit could fit in the pool's memory."""
        others = [other for other in self.units if other is not unit]
        resident = sum((other.least_resident for other in others), np.zeros(len(unit.counts)))
        extra = np.max([np.zeros(len(unit.counts)), *(other.least_extra for other in others)], axis=0)
        taken = np.repeat(resident, unit.counts) + np.maximum(np.repeat(extra, unit.counts), unit.extra)
        host = sum((other.least_host for other in others), np.zeros(len(unit.counts)))
        return self.limit.held(unit.resident + taken, unit.host + np.repeat(host, unit.counts))


class Completion:
    """The least memory with which combinations of a pool's first units can be completed."""

    def __init__(self, units: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Takes resident and extra bytes of each unit's options."""
        self._extras = np.unique(np.concatenate([extra for _, extra in units]))
        least = [self._extras]  # for each number of units at the end, by the largest extra bytes
        for resident, extra in reversed(units):
            order = np.argsort(extra, kind="stable")
            reached = np.searchsorted(extra[order], self._extras, side="right")
            stair = np.concatenate([[np.inf], np.minimum.accumulate(resident[order])])
            least.append(least[-1] + stair[reached])
        self._least = [np.minimum.accumulate(each[::-1])[::-1] for each in reversed(least)]

    def least_bytes(self, num_chosen: int, extra: np.ndarray) -> np.ndarray:
        """The least that the other units, and the largest extra bytes, add to the chosen units' resident bytes."""
        return self._least[num_chosen][np.searchsorted(self._extras, extra)]


def undominated(rows: np.ndarray) -> np.ndarray:
    """Indices, ascending, of the rows than which no other is at most as large in every column; one of equal rows."""
    if len(rows) < 2:
        return np.arange(len(rows))
    order = np.lexsort(rows.T[::-1])
    ordered = np.ascontiguousarray(rows[order].T)
    is_kept = np.ones(len(rows), dtype=bool)
    block = 64
    for start in range(0, len(rows), block):
        stop = min(start + block, len(rows))
        earlier = np.flatnonzero(is_kept[:stop])
        is_worse = ordered[0, earlier, None] <= ordered[0, None, start:stop]
        for column in ordered[1:]:
            is_worse &= column[earlier, None] <= column[None, start:stop]
        is_worse &= earlier[:, None] < np.arange(start, stop)[None]
        is_kept[start:stop] = ~is_worse.any(axis=0)
    return np.sort(order[is_kept])


def _numbers(unit: Unit, size: int, options: Sequence[Option], num_operations: int) -> np.ndarray:
    """[options, operations + 3] seconds, resident, extra and host bytes."""
    rows = [(*option.seconds, option.resident_bytes, option.extra_bytes, option.host_bytes) for option in options]
    if set(map(len, rows)) <= {num_operations + 3}:
        numbers = np.array(rows, dtype=float).reshape(-1, num_operations + 3)
        if (numbers >= 0).all() and np.isfinite(numbers).all():
            return numbers
    raise HybridflowError(
        f"An option of {'+'.join(unit)} on {size} devices is not {num_operations} seconds and three numbers of bytes,"
        " all finite and at least 0.",
        remedy="Correct the cost table.",
    )
