"""Divides items over ranks with nearly equal loads; groups stay together."""

import heapq
from collections.abc import Sequence

import numpy as np

_MOST_COMPARED = 64
"""Groups of a rank that are considered for an exchange: among the differences of 64 by 64 groups, one is close enough."""


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

    Starts with `owners` [G]; `costs` [G] are integers. Each time, the rank with the largest load gives the one with the
    smallest load a group, for one of its groups or for none, so that its own load is then as close as possible to the
    mean. About one exchange per rank is enough, so most groups stay where they are. No rank loses its last group.
    """
    owners, costs = owners.copy(), costs.astype(np.float64)
    loads = np.bincount(owners, costs, minlength=parts)
    mean = loads.sum() / parts
    by_owner = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=parts))
    groups_of = [part.tolist() for part in np.split(by_owner, ends[:-1])]
    for _ in range(4 * parts):
        high, low = int(loads.argmax()), int(loads.argmin())
        if loads[high] <= most:
            break
        given, returned = (np.array(groups_of[part][:_MOST_COMPARED], dtype=np.int64) for part in (high, low))
        gains = costs[given][:, None] - np.append(0.0, costs[returned])
        distance = np.abs(gains - (loads[high] - mean))
        distance[(gains <= 0) | (gains >= loads[high] - loads[low])] = np.inf
        if len(groups_of[high]) == 1:
            distance[:, 0] = np.inf
        row, column = np.unravel_index(distance.argmin(), distance.shape)
        if distance[row, column] == np.inf:
            break
        moves = [(int(given[row]), high, low)]
        moves += [(int(returned[column - 1]), low, high)] if column else []
        for group, source, target in moves:
            groups_of[source].remove(group)
            groups_of[target].append(group)
            owners[group] = target
        loads[high] -= gains[row, column]
        loads[low] += gains[row, column]
    return owners
