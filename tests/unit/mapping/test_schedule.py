"""The schedule of a step, by hand."""

import pytest

from hybridflow.mapping.operations import Operation, OperationKind
from hybridflow.mapping.schedule import chains, schedule


def step(*calls: tuple[str, tuple[int, ...]]) -> list[Operation]:
    return [Operation(f"{role}.{at}", role, OperationKind.forward, needs) for at, (role, needs) in enumerate(calls)]


PPO = step(
    ("rollout", ()), ("reward", (0,)), ("critic", (0,)), ("actor", (0,)), ("critic", (1, 2, 3)), ("actor", (1, 2, 3))
)
SECONDS = (10.0, 3.0, 4.0, 2.0, 8.0, 9.0)


def test_operations_of_one_pool_run_one_after_another():
    found = schedule(PPO, SECONDS, dict.fromkeys(("rollout", "reward", "critic", "actor"), 0))
    assert found.starts == (0, 10, 13, 17, 19, 27)
    assert found.seconds == 36
    assert found.critical == (0, 1, 2, 3, 4, 5)
    assert found.idle_fractions == (0,)


def test_operations_of_different_pools_overlap():
    found = schedule(PPO, SECONDS, {"rollout": 0, "actor": 0, "reward": 1, "critic": 1})
    assert found.starts == (0, 10, 13, 10, 17, 17)
    assert found.ends == (10, 13, 17, 12, 25, 26)
    assert found.critical == (0, 1, 2, 5)
    assert found.busy_seconds == (21, 15)
    assert found.idle_fractions == (pytest.approx(5 / 26), pytest.approx(11 / 26))


def test_an_operation_outside_of_pools_waits_only_for_its_needs():
    found = schedule(step(("a", ()), ("functions", ()), ("functions", (0,))), (5.0, 1.0, 2.0), {"a": 0})
    assert found.starts == (0, 0, 5)


def test_a_step_that_runs_ahead_is_as_long_as_its_busiest_pool():
    found = schedule(PPO, SECONDS, {"rollout": 0, "actor": 1, "reward": 1, "critic": 1}, lag=1)
    assert found.seconds == 26
    assert found.critical == (1, 2, 3, 4, 5)
    assert found.idle_fractions == (pytest.approx(16 / 26), 0)


def test_a_step_that_runs_ahead_takes_its_share_of_the_chain_from_generation_to_update():
    pools = {"rollout": 0, "actor": 1, "reward": 2, "critic": 3}
    assert schedule(PPO, (10.0, 3.0, 4.0, 2.0, 1.0, 9.0), pools, lag=1).seconds == 23 / 2
    assert schedule(PPO, (10.0, 3.0, 4.0, 2.0, 1.0, 9.0), pools, lag=2).seconds == 11


def test_chains_are_the_longest_paths_through_needs_and_pools():
    found = chains(PPO, {"rollout": 0, "actor": 0, "reward": 1, "critic": 1})
    assert {chain.members for chain in found} == {
        frozenset(each) for each in ((0, 1, 2, 4), (0, 1, 2, 5), (0, 3, 4), (0, 3, 5))
    }
