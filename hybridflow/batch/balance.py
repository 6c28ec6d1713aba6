"""Divides items over ranks with nearly equal loads; groups stay together."""

import heapq
from collections.abc import Sequence

import numpy as np

_MOST_COMPARED, _MOST_ROUNDS = 32, 24
"""Groups of a rank that are considered for an exchange (some difference of 32 by 32 is close enough), and rounds."""


def balanced_groups(group_ids: Sequence[int], costs: Sequence[float], parts: int) -> list[list[int]]:
    """Row positions for each of `parts` ranks: rows of one group stay together, loads are nearly equal.

    Longest processing time first: the largest load is at most 4/3 of the optimum (Graham 1969). Rows of a part are in
    ascending order.
    """
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows_of.setdefault(group, []).append(row)
    load_of = {group: sum(costs[row] for row in rows) for group, rows in rows_of.items()}
    heap = [(0.0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for group in sorted(rows_of, key=lambda g: -load_of[g]):
        load, part = heapq.heappop(heap)
        chosen[part].extend(rows_of[group])
        heapq.heappush(heap, (load + load_of[group], part))
    return [sorted(rows) for rows in chosen]


def exchanged_groups(owners: np.ndarray, costs: np.ndarray, parts: int, *, most: float) -> np.ndarray:
    """The rank of each group [G] after exchanges that bring loads to at most `most`, as far as that succeeds.

    Starts with `owners` [G], with `costs` [G]. In each round, every rank with more exchanges a group with one of the
    ranks with the smallest loads, for one of its groups or for none, so that both loads are then as close as possible:
    the largest with the smallest, the next largest with the next smallest and so on in the first round, and with others
    later. One or two exchanges per rank are enough, so most groups stay where they are. No rank loses its last group.
    """
    owners, costs = owners.copy(), costs.astype(np.float64)
    for shift in range(_MOST_ROUNDS):
        loads = np.bincount(owners, costs, minlength=parts)
        by_load = np.argsort(loads, kind="stable")
        count = min(parts // 2, int((loads > most).sum()))
        if not count:
            break
        low, high = np.roll(by_load[: parts // 2], -shift)[:count], by_load[::-1][:count]
        wanted = (loads[high] - loads[low]) / 2
        table = _first_groups(owners, parts)
        given = np.where(table >= 0, costs[table], np.inf)[high]
        returned = np.where(table >= 0, costs[table], -np.inf)[low]
        nothing = np.where(table[high, 1:2] >= 0, 0.0, -np.inf) if table.shape[1] > 1 else np.full((count, 1), -np.inf)
        gains = given[:, :, None] - np.concatenate([nothing, returned], 1)[:, None, :]
        distance = np.abs(gains - wanted[:, None, None]).reshape(count, -1)
        best = distance.argmin(1)
        pairs = np.flatnonzero(distance[np.arange(count), best] < wanted)
        row, column = np.divmod(best[pairs], gains.shape[2])
        owners[table[high[pairs], row]] = low[pairs]
        is_swap = column > 0
        owners[table[low[pairs], column - 1][is_swap]] = high[pairs][is_swap]
    return owners


def _first_groups(owners: np.ndarray, parts: int) -> np.ndarray:
    """The first groups of each rank, as many as are compared, [parts, groups]; -1 where it has fewer."""
    by_owner = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=parts)
    position = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((parts, max(1, min(_MOST_COMPARED, int(counts.max())))), -1)
    is_compared = position < table.shape[1]
    table[owners[by_owner][is_compared], position[is_compared]] = by_owner[is_compared]
    return table
