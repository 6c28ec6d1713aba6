"""Divides items over ranks with nearly equal loads; groups stay together."""

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_MOST_COMPARED, _MOST_ROUNDS = 16, 24
"""Groups of a rank that are considered for an exchange (some difference of 16 by 16 is close enough), and rounds."""


def balanced_groups(
    group_ids: Sequence[int] | np.ndarray, costs: Sequence[float] | np.ndarray, parts: int
) -> list[list[int]]:
    """Row positions for each of `parts` ranks: rows of one group stay together, loads are nearly equal.

    Longest processing time first: the largest load is at most 4/3 of the optimum (Graham 1969). Rows of a part are in
    ascending order.
    """
    _, first_rows, groups = np.unique(np.asarray(group_ids), return_index=True, return_inverse=True)
    loads = np.bincount(groups, np.asarray(costs, dtype=np.float64))
    owners, heap = np.zeros(len(loads), dtype=np.int64), [(0.0, part) for part in range(parts)]
    for group in np.lexsort((first_rows, -loads)).tolist():
        load, part = heapq.heappop(heap)
        owners[group] = part
        heapq.heappush(heap, (load + float(loads[group]), part))
    own = owners[groups]
    rows = np.argsort(own, kind="stable").tolist()
    ends = np.cumsum(np.bincount(own, minlength=parts)).tolist()
    return [rows[start:end] for start, end in pairwise([0, *ends])]


def exchanged_groups(owners: np.ndarray, costs: np.ndarray, parts: int, *, most: np.ndarray) -> np.ndarray:
    """The rank of each group [G] after exchanges that bring loads to at most `most`, as far as that succeeds.

    Starts with `owners` [G], with `costs` [G]. In each round, every rank with more exchanges a group with one of the
    ranks with the smallest loads, for one of its groups or for none, so that both loads are then as close as possible:
    the largest with the smallest, the next largest with the next smallest and so on in the first round, and with others
    later. One or two exchanges per rank are enough, so most groups stay where they are. No rank loses its last group.

    It balances M minibatches at once: rank r of minibatch m has the number m * parts + r, and `most` [M] has the limit
    of each.
    """
    owners, costs = owners.copy(), costs.astype(np.float64)
    starts = parts * np.arange(len(most))[:, None]
    for shift in range(_MOST_ROUNDS):
        loads = np.bincount(owners, costs, minlength=parts * len(most))
        of_minibatches = loads.reshape(-1, parts)
        by_load = np.argsort(of_minibatches, axis=1, kind="stable") + starts
        counts = np.minimum(parts // 2, (of_minibatches > most[:, None]).sum(1))
        if not counts.any():
            break
        is_paired = np.arange(parts // 2) < counts[:, None]
        low = np.roll(by_load[:, : parts // 2], -shift, axis=1)[is_paired]
        high = by_load[:, ::-1][:, : parts // 2][is_paired]
        wanted = (loads[high] - loads[low]) / 2
        of_high, of_low = _first_groups(owners, high), _first_groups(owners, low)
        given = np.where(of_high >= 0, costs[of_high], np.inf)
        returned = np.where(of_low >= 0, costs[of_low], -np.inf)
        nothing = np.where((of_high >= 0).sum(1) > 1, 0.0, -np.inf)[:, None]
        gains = given[:, :, None] - np.concatenate([nothing, returned], 1)[:, None, :]
        distance = np.abs(gains - wanted[:, None, None]).reshape(len(high), -1)
        best = distance.argmin(1)
        pairs = np.flatnonzero(distance[np.arange(len(high)), best] < wanted)
        row, column = np.divmod(best[pairs], gains.shape[2])
        owners[of_high[pairs, row]] = low[pairs]
        is_swap = column > 0
        owners[of_low[pairs, column - 1][is_swap]] = high[pairs][is_swap]
    return owners


def _first_groups(owners: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """The first groups of some ranks, as many as are compared, [ranks, groups]; -1 where a rank has fewer."""
    places = np.full(1 + int(max(owners.max(), ranks.max())), -1)
    places[ranks] = np.arange(len(ranks))
    place = places[owners]
    groups = np.flatnonzero(place >= 0)
    by_place = groups[np.argsort(place[groups], kind="stable")]
    counts = np.bincount(place[groups], minlength=len(ranks))
    position = np.arange(len(groups)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((len(ranks), max(1, min(_MOST_COMPARED, int(counts.max())))), -1)
    is_compared = position < table.shape[1]
    table[place[by_place][is_compared], position[is_compared]] = by_place[is_compared]
    return table
