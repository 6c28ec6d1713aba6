"""Arithmetic on boxes of indices. Imports without torch.

A box is empty if any of its intervals is. The box of a scalar, (), holds one element.
"""

import math
from collections.abc import Iterable, Sequence

Box = tuple[tuple[int, int], ...]
"""A half-open interval of indices per dimension: ((0, 896), (0, 3584)) is the first 896 rows."""


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(max(0, high - low) for low, high in box)


def intersection(first: Box, second: Box) -> Box | None:
    """The box of the indices in both; None if there are none."""
    common = tuple(
        (max(low, other_low), min(high, other_high))
        for (low, high), (other_low, other_high) in zip(first, second, strict=True)
    )
    return common if volume(common) else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether every index of `inner` is in `outer`."""
    return not volume(inner) or all(
        low <= inner_low and inner_high <= high
        for (low, high), (inner_low, inner_high) in zip(outer, inner, strict=True)
    )


def difference(box: Box, other: Box) -> list[Box]:
    """The indices of `box` that are not in `other`, as disjoint boxes: at most two per dimension."""
    common = intersection(box, other)
    if common is None:
        return [box] if volume(box) else []
    return [
        (*common[:dim], interval, *box[dim + 1 :])
        for dim, ((low, high), (common_low, common_high)) in enumerate(zip(box, common, strict=True))
        for interval in ((low, common_low), (common_high, high))
        if interval[0] < interval[1]
    ]


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """The indices of `box` that are in none of `boxes`, as disjoint boxes."""
    left = [box] if volume(box) else []
    for other in boxes:
        left = [piece for part in left for piece in difference(part, other)]
    return left


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """Whether no index is in two of the boxes."""
    filled = sorted(box for box in boxes if volume(box))
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # they are sorted: all others begin even later
            if intersection(box, other) is not None:
                return False
    return True


def cells(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes with the same indices as `boxes` together, each inside or outside every one of them."""
    found: list[Box] = []
    for box in dict.fromkeys(box for box in boxes if volume(box)):
        fresh = uncovered(box, found)
        parts: list[Box] = []
        for cell in found:
            common = intersection(cell, box)
            parts += [cell] if common is None else [common, *difference(cell, box)]
        found = parts + fresh
    return sorted(found)


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices of `box` in a tensor that holds `outer`: `tensor[slices_within(box, outer)]` is a view of it."""
    assert contains(outer, box), f"{box} is not inside {outer}"
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True))


def box_text(box: Box) -> str:
    """A box as text: [0:896, 0:3584]."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"
