"""Equal loads: groups are moved, never torn."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.balance import balanced_groups, exchanged_groups

groups_and_costs = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 50)), min_size=1, max_size=24)


@given(groups_and_costs, st.integers(1, 4))
def test_every_row_is_on_one_rank_groups_are_whole_and_loads_close(rows, parts):
    groups, costs = zip(*rows, strict=True)
    chosen = balanced_groups(groups, costs, parts)
    assert len(chosen) == parts
    assert sorted(row for part in chosen for row in part) == list(range(len(rows)))
    of_group = {group: sum(cost for g, cost in rows if g == group) for group in groups}
    for group in of_group:
        assert sum(any(groups[row] == group for row in part) for part in chosen) == 1
    loads = [sum(costs[row] for row in part) for part in chosen]
    assert max(loads) <= sum(costs) / parts + max(of_group.values())


def test_rows_keep_their_order_on_a_rank():
    assert balanced_groups([5, 5, 9, 9], [1, 1, 3, 3], 2) == [[2, 3], [0, 1]]
    assert balanced_groups([9, 5, 9, 5], [1, 1, 1, 1], 1) == [[0, 1, 2, 3]]


@given(groups_and_costs, st.integers(1, 4))
def test_exchanges_never_make_the_largest_load_larger_or_empty_a_rank(rows, parts):
    owners, costs = (np.array(column) for column in zip(*rows, strict=True))
    owners = owners % parts
    moved = exchanged_groups(owners, costs, parts, most=np.zeros(1))
    before, after = (np.bincount(each, costs, minlength=parts) for each in (owners, moved))
    assert after.max() <= before.max() and after.sum() == before.sum()
    assert set(owners) <= set(moved) <= set(range(parts))


def test_about_one_exchange_per_rank_balances_many_groups():
    draw = np.random.default_rng(0)
    parts, each = 64, 32
    owners, costs = np.repeat(np.arange(parts), each), draw.integers(40, 130, parts * each)
    mean = costs.sum() / parts
    assert np.bincount(owners, costs).max() > 1.05 * mean
    moved = exchanged_groups(owners, costs, parts, most=np.array([1.01 * mean]))
    assert np.bincount(moved, costs).max() <= 1.01 * mean
    assert (moved != owners).sum() <= 2 * parts


def test_minibatches_are_balanced_together_as_each_is_alone():
    draw = np.random.default_rng(0)
    parts, each = 8, 32
    alone, costs = np.repeat(np.arange(parts), each), [draw.integers(40, 130, parts * each), np.full(parts * each, 50)]
    most = np.array([1.01 * own.sum() / parts for own in costs])
    expected = [exchanged_groups(alone, own, parts, most=limit[None]) for own, limit in zip(costs, most, strict=True)]
    assert (expected[0] != alone).any() and (expected[1] == alone).all()
    together = exchanged_groups(np.append(alone, alone + parts), np.concatenate(costs), parts, most=most)
    assert together.tolist() == [*expected[0], *(expected[1] + parts)]


def test_balanced_loads_are_left_alone():
    owners = np.array([0, 1, 0, 1])
    assert exchanged_groups(owners, np.array([3, 2, 2, 3]), 2, most=np.array([5.0])).tolist() == [0, 1, 0, 1]
