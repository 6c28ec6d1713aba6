"""The best allocation of devices to the pools of one placement, and the best option of each unit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridflow.mapping.tables import Combinations, PoolTable

SAME = 1e-9
"""Steps whose seconds differ by less than this fraction are equally long."""

_BLOCK_CELLS = 1 << 21
"""Most numbers in an array of bounds."""

_BEAM = 64
_FIRST_CHUNK = 32


@dataclass(frozen=True)
class Score:
    """The quantities that a search minimizes: seconds; on ties, idle devices; on further ties, summed seconds."""

    seconds: float
    idle_devices: float
    total_seconds: float

    def is_beaten_by(self, seconds: np.ndarray, idle_devices: np.ndarray, total_seconds: np.ndarray) -> np.ndarray:
        """Whether each score, or lower bound of scores, is better."""
        is_tied = (seconds <= self.seconds * (1 + SAME)) & np.isfinite(seconds)
        is_shorter = total_seconds < self.total_seconds * (1 - SAME)
        has_fewer_idle = (idle_devices < self.idle_devices) | ((idle_devices == self.idle_devices) & is_shorter)
        return (seconds < self.seconds * (1 - SAME)) | (is_tied & has_fewer_idle)

    def __lt__(self, other: "Score") -> bool:
        return bool(other.is_beaten_by(*map(np.array, (self.seconds, self.idle_devices, self.total_seconds))))


WORST = Score(np.inf, np.inf, np.inf)


@dataclass(frozen=True)
class Best:
    """The best plan found so far."""

    score: Score
    devices: tuple[int, ...] = ()
    """Devices of each pool."""

    rows: tuple[tuple[int, ...], ...] = ()
    """For each pool, the rows in the tables of its units."""


class _Pool:
    """A pool of the placement, on the sizes on which it could fit."""

    def __init__(self, table: PoolTable, sizes: Sequence[int], all_sizes: Sequence[int], weights: np.ndarray) -> None:
        bounds = table.bounds(weights)
        allowed = np.isin(all_sizes, sizes) & np.isfinite(bounds[:, -1])
        self.table = table
        self.indices = np.flatnonzero(allowed)
        """Positions of the sizes in the tables."""
        self.devices = np.array(all_sizes, dtype=int)[self.indices]
        self.bounds = bounds[self.indices]
        """[sizes, chains]; the last chain holds all operations."""
        self.combinations: dict[int, Combinations] = {}
        """By position in `devices`."""


@dataclass(frozen=True)
class _Partial:
    """Plans that are decided for the first pools, or allocations of devices to the first pools."""

    left: np.ndarray
    """Devices that no pool has yet; or the number of each plan's allocation."""

    lengths: np.ndarray
    """[plans, chains] seconds that the first pools add to each chain, or lower bounds of them."""

    chosen: np.ndarray
    """[plans, pools] positions among each pool's sizes, or combinations."""

    def blocks(self, cells_per_plan: int) -> Iterator["_Partial"]:
        """Consecutive plans, as many at a time as a block of bounds can have."""
        step = max(1, _BLOCK_CELLS // max(1, cells_per_plan))
        for start in range(0, len(self.left), step):
            block = slice(start, start + step)
            yield _Partial(self.left[block], self.lengths[block], self.chosen[block])

    def grown(self, plans: np.ndarray, choices: np.ndarray, left: np.ndarray, lengths: np.ndarray) -> "_Partial":
        """These of the plans with these choices for one more pool."""
        return _Partial(left, lengths, np.concatenate([self.chosen[plans], choices[:, None]], axis=1))


class PlacementSearch:
    """Branch and bound over one placement.

        search = PlacementSearch(tables, sizes, all_sizes, weights, fixed_lengths, num_devices)
        best = search.improved(Best(WORST))

    A step is as long as its longest chain (see `schedule.chains`), so the least that each pool adds to a chain, summed
    over the pools, is a lower bound for each chain. The search first decides the devices of each pool, then the options
    of the allocations whose bounds are better than the best plan so far, in ascending order of the bounds. A search
    that follows only the most promising allocations and options comes first, so that few remain for the exact one.
    """

    def __init__(
        self,
        tables: Sequence[PoolTable],
        sizes: Sequence[Sequence[int]],
        all_sizes: Sequence[int],
        weights: np.ndarray,
        fixed_lengths: np.ndarray,
        num_devices: int,
    ) -> None:
        """Takes the table and the allowed sizes of each pool; all sizes of the tables; the weights [chains, operations]
        of the chains, the last of which holds all operations; and the seconds of operations outside of pools on each
        chain."""
        self.num_evaluated = 0
        """Allocations whose options were examined."""
        self._num_devices = num_devices
        self._weights = weights
        self._fixed = fixed_lengths
        self._pools = [_Pool(table, own, all_sizes, weights) for table, own in zip(tables, sizes, strict=True)]
        self._slot = int(np.gcd.reduce([num_devices, *(size for pool in self._pools for size in pool.devices)]))
        self._rest = self._bounds_of_rest()

    def bound(self) -> float:
        """A lower bound of the seconds; infinite if the pools do not fit."""
        first = self._pools[0]
        left = self._num_devices - first.devices
        bounds = self._fixed + first.bounds + self._rest[0][left // self._slot]
        return float(bounds[:, :-1].max(axis=1).min(initial=np.inf))

    def improved(self, best: Best) -> Best:
        """The best plan of the placement if it is better than `best`, else `best`."""
        if not np.isfinite(self.bound()):
            return best
        best = self._improved(best, _BEAM)
        if not np.isfinite(best.score.seconds):
            self._drop_sizes_that_do_not_fit()
            best = self._improved(best, _BEAM)
        return self._improved(best, None)

    def _improved(self, best: Best, width: int | None) -> Best:
        start = _Partial(np.array([self._num_devices]), self._fixed[None], np.zeros((1, 0), dtype=int))
        return self._best_allocation(start, best, width)

    def _bounds_of_rest(self) -> list[np.ndarray]:
        """For each pool, [slots + 1, chains] lower bounds of what the pools after it add with this many slots. Each
        chain has its own best allocation."""
        num_slots = self._num_devices // self._slot
        found = [np.zeros((num_slots + 1, len(self._weights)))]
        for pool in reversed(self._pools[1:]):
            bounds = np.full_like(found[-1], np.inf)
            for slots, own in zip((pool.devices // self._slot).tolist(), pool.bounds, strict=True):
                np.minimum(bounds[slots:], found[-1][: num_slots + 1 - slots] + own, out=bounds[slots:])
            found.append(bounds)
        return found[::-1]

    def _drop_sizes_that_do_not_fit(self) -> None:
        """Makes the bounds infinite where the options that fit one by one do not fit together."""
        for pool in self._pools:
            for size, index in enumerate(pool.indices):
                unlimited = np.full(len(self._weights), np.inf)
                if not len(pool.table.combinations(index, self._weights, unlimited, width=1).rows):
                    pool.bounds[size] = np.inf
        self._rest = self._bounds_of_rest()

    def _best_allocation(self, partial: _Partial, best: Best, width: int | None) -> Best:
        """The best of the plans whose first pools have these devices."""
        position = partial.chosen.shape[1]
        if position == len(self._pools):
            return self._best_options(partial.chosen, best, width)
        pool, rest = self._pools[position], self._rest[position]
        is_last = position + 1 == len(self._pools)
        for block in partial.blocks(pool.bounds.size):
            left = block.left[:, None] - pool.devices[None]
            lengths = block.lengths[:, None] + pool.bounds[None]
            bounds = lengths + rest[np.maximum(left, 0) // self._slot]
            seconds = np.where(left < 0, np.inf, bounds[..., :-1].max(axis=-1))
            idle = left if is_last else np.zeros_like(left)
            plans, choices = _in_order(best.score, seconds, idle, bounds[..., -1], width)
            grown = block.grown(plans, choices, left[plans, choices], lengths[plans, choices])
            best = self._best_allocation(grown, best, width)
        return best

    def _best_options(self, allocations: np.ndarray, best: Best, width: int | None) -> Best:
        """The best plan with one of these allocations [allocations, pools], given in ascending order of bounds."""
        start, chunk = 0, _FIRST_CHUNK
        while start < len(allocations):
            promising = self._promising(allocations[start : start + chunk], best.score)
            start, chunk = start + chunk, 4 * chunk
            combinations = [
                {size: self._combinations(number, size, best.score, width) for size in np.unique(promising[:, number])}
                for number in range(len(self._pools))
            ]
            promising = self._promising(promising, best.score)
            if len(promising):
                self.num_evaluated += len(promising)
                chosen = _Chosen(promising, combinations)
                lengths = np.broadcast_to(self._fixed, (len(promising), len(self._fixed)))
                none = np.zeros((len(promising), 0), dtype=int)
                best = self._best_plan(_Partial(np.arange(len(promising)), lengths, none), chosen, best, width)
        return best

    def _promising(self, allocations: np.ndarray, score: Score) -> np.ndarray:
        """The allocations whose bounds are better than the score."""
        bounds = self._fixed + sum(pool.bounds[own] for pool, own in zip(self._pools, allocations.T, strict=True))
        return allocations[score.is_beaten_by(bounds[:, :-1].max(axis=1), self._idle(allocations), bounds[:, -1])]

    def _idle(self, allocations: np.ndarray) -> np.ndarray:
        """Devices that are in no pool."""
        used = sum(pool.devices[own] for pool, own in zip(self._pools, allocations.T, strict=True))
        return np.asarray(self._num_devices - used)

    def _combinations(self, number: int, size: int, score: Score, width: int | None) -> Combinations:
        """The combinations of a pool's options on one of its sizes; without a width, of those that could be better than
        the score. Later scores are better, so the combinations are kept, and tighten the pool's bounds."""
        pool = self._pools[number]
        if width is not None:
            return pool.table.combinations(pool.indices[size], self._weights, self._room(number, size, score), width)
        if size not in pool.combinations:
            found = pool.table.combinations(pool.indices[size], self._weights, self._room(number, size, score))
            pool.combinations[size] = found
            pool.bounds[size] = found.lengths.min(axis=0, initial=np.inf)
        return pool.combinations[size]

    def _room(self, number: int, size: int, score: Score) -> np.ndarray:
        """The most that a pool of this size can add to each chain of a plan that is no worse than the score."""
        others = [pool for pool in self._pools if pool is not self._pools[number]]
        least = sum(pool.devices[0] for pool in others)
        spare = self._num_devices - self._pools[number].devices[size] - least
        bounds = [pool.bounds[pool.devices <= pool.devices[0] + spare].min(axis=0) for pool in others]
        return score.seconds * (1 + SAME) - self._fixed - sum(bounds)

    def _best_plan(self, partial: _Partial, chosen: "_Chosen", best: Best, width: int | None) -> Best:
        """The best of the plans whose first pools have these options."""
        position = partial.chosen.shape[1]
        if position == len(self._pools):
            return self._best_of(partial, chosen, best)
        for block in partial.blocks(chosen.lengths[position][0].size):
            allocations = block.left
            lengths = block.lengths[:, None] + chosen.lengths[position][chosen.sizes[position][allocations]]
            bounds = lengths + chosen.rest[position + 1][allocations][:, None]
            idle = self._idle(chosen.allocations)[allocations][:, None]
            seconds = bounds[..., :-1].max(axis=-1)
            plans, choices = _in_order(best.score, seconds, idle, bounds[..., -1], width)
            grown = block.grown(plans, choices, allocations[plans], lengths[plans, choices])
            best = self._best_plan(grown, chosen, best, width)
        return best

    def _best_of(self, plans: _Partial, chosen: "_Chosen", best: Best) -> Best:
        """The best of plans that are decided for all pools."""
        if not len(plans.left):
            return best
        seconds, totals = plans.lengths[:, :-1].max(axis=1), plans.lengths[:, -1]
        idle = self._idle(chosen.allocations)[plans.left]
        tied = np.flatnonzero(seconds <= seconds.min() * (1 + SAME))
        first = tied[np.lexsort((totals[tied], idle[tied]))[0]]
        score = Score(float(seconds[first]), float(idle[first]), float(totals[first]))
        if not score < best.score:
            return best
        sizes = chosen.allocations[plans.left[first]]
        return Best(
            score,
            tuple(int(pool.devices[size]) for pool, size in zip(self._pools, sizes, strict=True)),
            tuple(
                tuple(found[size].rows[row].tolist())
                for found, size, row in zip(chosen.combinations, sizes, plans.chosen[first], strict=True)
            ),
        )


class _Chosen:
    """Allocations, and the combinations of each pool on the sizes that they give it."""

    def __init__(self, allocations: np.ndarray, combinations: Sequence[dict[int, Combinations]]) -> None:
        self.allocations = allocations
        self.combinations = combinations
        self.sizes: list[np.ndarray] = []
        """For each pool, the row of `lengths` of each allocation."""
        self.lengths: list[np.ndarray] = []
        """For each pool, [sizes, combinations, chains], padded with infinity."""
        for own, found in zip(allocations.T, combinations, strict=True):
            distinct, rows = np.unique(own, return_inverse=True)
            parts = [found[size].lengths for size in distinct]
            padded = np.full((len(parts), max(len(part) for part in parts), parts[0].shape[1]), np.inf)
            for row, part in zip(padded, parts, strict=True):
                row[: len(part)] = part
            self.sizes.append(rows)
            self.lengths.append(padded)
        rest = [np.zeros((len(allocations), self.lengths[0].shape[2]))]
        for rows, lengths in zip(reversed(self.sizes), reversed(self.lengths), strict=True):
            rest.append(rest[-1] + lengths.min(axis=1, initial=np.inf)[rows])
        self.rest = rest[::-1]
        """For each number of first pools, [allocations, chains] lower bounds of what the others add."""


def _in_order(
    score: Score, seconds: np.ndarray, idle: np.ndarray, totals: np.ndarray, width: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of the bounds that are better than the score, best first; at most `width`, if given."""
    plans, choices = np.nonzero(score.is_beaten_by(seconds, idle, totals))
    idle = np.broadcast_to(idle, seconds.shape)
    keys = totals[plans, choices], idle[plans, choices], seconds[plans, choices]
    order = np.lexsort(keys)[:width]
    return plans[order], choices[order]
