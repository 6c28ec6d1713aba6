"""Arithmetic on boxes of indices: one half-open interval a dimension. Imports without torch.

A box is empty where one of its intervals is; the box of a scalar, (), holds one element.
"""

import math
from collections.abc import Iterable, Sequence

from hybridflow.parallel.layout import Box


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(max(0, high - low) for low, high in box)


def intersection(first: Box, second: Box) -> Box | None:
    """The box of the indices in both; None where there are none."""
    common = tuple(
        (max(low, other_low), min(high, other_high))
        for (low, high), (other_low, other_high) in zip(first, second, strict=True)
    )
    return common if volume(common) else None


def contains(outer: Box, inner: Box) -> bool:
    """Every index of `inner` is in `outer`."""
    return not volume(inner) or all(
        low <= inner_low and inner_high <= high
        for (low, high), (inner_low, inner_high) in zip(outer, inner, strict=True)
    )


def difference(box: Box, other: Box) -> list[Box]:
    """The indices of `box` that are not in `other`, as disjoint boxes: at most two a dimension."""
    common = intersection(box, other)
    if common is None:
        return [box] if volume(box) else []
    left: list[Box] = []
    for dim, ((low, high), (common_low, common_high)) in enumerate(zip(box, common, strict=True)):
        for interval in ((low, common_low), (common_high, high)):
            if interval[0] < interval[1]:
                left.append((*common[:dim], interval, *box[dim + 1 :]))
    return left


def uncovered(box: Box, boxes: Iterable[Box]) -> list[Box]:
    """The indices of `box` that are in none of `boxes`, as disjoint boxes."""
    left = [box] if volume(box) else []
    for other in boxes:
        left = [piece for part in left for piece in difference(part, other)]
    return left


def covers(boxes: Iterable[Box], box: Box) -> bool:
    """Every index of `box` is in at least one of `boxes`."""
    return not uncovered(box, boxes)


def are_disjoint(boxes: Sequence[Box]) -> bool:
    """No index is in two of the boxes."""
    filled = sorted(box for box in boxes if volume(box))
    for number, box in enumerate(filled):
        for other in filled[number + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # sorted by the first dimension: the rest begin later still
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
    """Where `box` lies in a tensor that holds `outer`: `tensor[slices_within(box, outer)]` is a view of that part."""
    assert contains(outer, box), f"{box} is not inside {outer}"
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True))


def box_text(box: Box) -> str:
    """A box as people write it: [0:896, 0:3584]."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"
