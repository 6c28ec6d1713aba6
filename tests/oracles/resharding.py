"""Resharding one element at a time: who may send which element to whom, how many bytes must move, what arrives.

A layout is a list, one entry a rank, of (name, shape, box, bytes an element).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

Index = tuple[int, ...]
Element = tuple[str, Index]
Layout = Sequence[Sequence[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...], int]]]
Store = dict[tuple[str, tuple[tuple[int, int], ...]], NDArray]


def elements(layout: Layout) -> list[dict[Element, int]]:
    """The elements of each rank, with their bytes."""
    found: list[dict[Element, int]] = []
    for holdings in layout:
        own = {}
        for name, _, box, itemsize in holdings:
            for index in product(*(range(low, high) for low, high in box)):
                own[name, index] = itemsize
        found.append(own)
    return found


def nearest_sources(
    held: list[dict[Element, int]], element: Element, rank: int, nodes: Sequence[str], neighbors: Sequence[int]
) -> set[int]:
    """The ranks that may send an element to a rank: itself, else its neighbors, else its node, else anybody."""
    holders = {other for other, own in enumerate(held) if element in own}
    for near in (
        {other for other in holders if other == rank},
        {other for other in holders if neighbors[other] == neighbors[rank]},
        {other for other in holders if nodes[other] == nodes[rank]},
    ):
        if near:
            return near
    return holders


def bytes_missing(held: dict[Element, int], wanted: dict[Element, int]) -> int:
    """Bytes of what is wanted and not held: what must come from others."""
    return sum(itemsize for element, itemsize in wanted.items() if element not in held)


def times_covered(
    pieces: Sequence[tuple[str, tuple[tuple[int, int], ...], int, int, int]], ranks: int
) -> list[Counter[Element]]:
    """How often each element comes to each rank, by the pieces (name, box, source, destination, itemsize)."""
    counts: list[Counter[Element]] = [Counter() for _ in range(ranks)]
    for name, box, _, destination, _ in pieces:
        counts[destination].update((name, index) for index in product(*(range(low, high) for low, high in box)))
    return counts


def numbered_model(layout: Layout) -> dict[str, NDArray]:
    """A whole model with the shapes of a layout, in which every element is another number."""
    shapes = {name: shape for holdings in layout for name, shape, _, _ in holdings}
    model, start = {}, 1
    for name, shape in sorted(shapes.items()):
        size = int(np.prod(shape))
        model[name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    return model


def sharded(model: dict[str, NDArray], layout: Layout) -> list[Store]:
    """What each rank holds of a model, as copies."""
    return [
        {(name, box): model[name][tuple(slice(low, high) for low, high in box)].copy() for name, _, box, _ in holdings}
        for holdings in layout
    ]


def empty(layout: Layout) -> list[Store]:
    """Room for what each rank wants, filled with -1."""
    return [
        {(name, box): np.full([high - low for low, high in box], -1, dtype=np.int64) for name, _, box, _ in holdings}
        for holdings in layout
    ]


def carry_out(
    pieces: Sequence[tuple[str, tuple[tuple[int, int], ...], int, int, int]], held: list[Store], wanted: list[Store]
) -> None:
    """Copies each piece from the one array of the source that has it to the one array of the destination."""
    for name, box, source, destination, _ in pieces:
        given, taken = _around(held[source], name, box), _around(wanted[destination], name, box)
        taken[1][_inside(box, taken[0])] = given[1][_inside(box, given[0])]


def _around(store: Store, name: str, box: tuple[tuple[int, int], ...]) -> tuple[tuple[tuple[int, int], ...], NDArray]:
    for (other, outer), array in store.items():
        if other == name and all(o[0] <= b[0] and b[1] <= o[1] for o, b in zip(outer, box, strict=True)):
            return outer, array
    raise AssertionError(f"no single array has {box} of {name}")


def _inside(box: tuple[tuple[int, int], ...], outer: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True))
