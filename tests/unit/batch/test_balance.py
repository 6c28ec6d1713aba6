"""Equal loads: groups are moved, never torn."""

from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch.balance import balanced_groups

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
