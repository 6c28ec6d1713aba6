"""Divides items over ranks with nearly equal loads; groups stay together."""

import heapq
from collections.abc import Sequence


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
