"""Boxes against sets of indices."""

from itertools import product

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from hybridflow.parallel.boxes import (
    Box,
    are_disjoint,
    box_text,
    cells,
    contains,
    intersection,
    slices_within,
    uncovered,
    volume,
)

INTERVALS = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda ends: (min(ends), max(ends)))
PLANES = st.tuples(INTERVALS, INTERVALS)
SPACES = st.tuples(INTERVALS, INTERVALS, INTERVALS)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(low, high) for low, high in box)))


def indices_of_all(boxes: list[Box]) -> set[tuple[int, ...]]:
    return {index for box in boxes for index in indices(box)}


@given(SPACES, SPACES)
def test_intersection_has_the_indices_in_both(first, second):
    common = intersection(first, second)
    assert indices(first) & indices(second) == (set() if common is None else indices(common))
    assert common is None or volume(common) == len(indices(common))


@given(SPACES, st.lists(SPACES, max_size=4))
@example(((0, 3),) * 3, [((1, 2),) * 3])
def test_uncovered_is_what_no_box_has(box, boxes):
    left = uncovered(box, boxes)
    assert indices_of_all(left) == indices(box) - indices_of_all(boxes)
    assert sum(map(volume, left)) == len(indices_of_all(left))


@given(PLANES, PLANES)
def test_a_box_contains_another_if_it_has_all_its_indices(outer, inner):
    assert contains(outer, inner) == (indices(inner) <= indices(outer))


@given(st.lists(PLANES, max_size=5))
def test_boxes_are_disjoint_if_no_index_is_in_two(boxes):
    assert are_disjoint(boxes) == (sum(map(volume, boxes)) == len(indices_of_all(boxes)))


@given(st.lists(PLANES, max_size=5))
def test_cells_are_disjoint_and_inside_or_outside_every_box(boxes):
    found = cells(boxes)
    assert are_disjoint(found)
    assert indices_of_all(found) == indices_of_all(boxes)
    for cell, box in product(found, boxes):
        assert indices(cell) <= indices(box) or not indices(cell) & indices(box)


@given(PLANES, PLANES)
def test_slices_find_a_box_in_the_tensor_of_another(outer, box):
    common = intersection(outer, box)
    if common is not None:
        numbers = np.arange(36).reshape(6, 6)
        held = numbers[tuple(slice(*interval) for interval in outer)]
        assert (held[slices_within(common, outer)] == numbers[tuple(slice(*interval) for interval in common)]).all()


def test_a_scalar_is_one_element():
    assert volume(()) == 1
    assert intersection((), ()) == ()
    assert uncovered((), [()]) == []
    assert uncovered((), []) == [()]
    assert not are_disjoint([(), ()])


def test_a_box_is_written_as_people_index():
    assert box_text(((0, 896), (0, 3584))) == "[0:896, 0:3584]"
