"""The schedule of a step, by hand."""

from collections.abc import Mapping, Sequence
from random import Random

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


UPDATE, PUBLISH = OperationKind.update, OperationKind.publish


GRPO_AHEAD = [
    Operation("rollout.generate", "rollout", OperationKind.generate, (), is_ahead=True),
    Operation("reward.score", "reward", OperationKind.forward, (0,), is_ahead=True),
    Operation("actor.logprobs", "actor", OperationKind.forward, (0,)),
    Operation("actor.update", "actor", UPDATE, (1, 2)),
    Operation("actor.publish_weights", "rollout", PUBLISH, (3,)),
]


@pytest.mark.parametrize(
    ("seconds", "length"),
    [
        ((10.0, 1.0, 2.0, 5.0, 0.5), 10.5),  # generation limits the step
        ((4.0, 1.0, 2.0, 5.0, 0.5), 7.5),  # learning does
        ((4.0, 9.0, 2.0, 5.0, 0.5), 18.5 / 2),  # from generation to the publication, one step later
    ],
)
def test_a_step_that_runs_ahead_is_as_long_as_the_longer_of_generation_and_learning(seconds, length):
    found = schedule(GRPO_AHEAD, seconds, {"rollout": 0, "reward": 1, "actor": 2}, lag=1)
    assert found.seconds == length


def test_a_transfer_of_weights_occupies_the_pools_of_both_sides():
    found = schedule(GRPO_AHEAD, (4.0, 1.0, 2.0, 5.0, 3.0), {"rollout": 0, "reward": 0, "actor": 1}, lag=1)
    assert found.seconds == 10
    assert found.critical == (2, 3, 4)
    assert found.busy_seconds == (8, 10)


def test_a_reward_model_between_the_updates_of_a_pool_leaves_nothing_to_overlap():
    seconds = (10.0, 1.0, 2.0, 5.0, 0.5)
    found = schedule(GRPO_AHEAD, seconds, {"rollout": 0, "reward": 1, "actor": 1}, lag=1)
    assert found.seconds == sum(seconds)  # the actor's pool waits for the reward, which waits for generation


def test_a_rollout_in_the_pool_of_the_actor_does_not_run_ahead():
    seconds = (10.0, 1.0, 2.0, 5.0, 0.5)
    assert schedule(GRPO_AHEAD, seconds, {"rollout": 0, "reward": 0, "actor": 0}, lag=1).seconds == sum(seconds)


def test_a_step_in_the_midst_of_a_run_starts_with_the_operations_that_are_ahead():
    found = schedule(GRPO_AHEAD, (4.0, 1.0, 2.0, 5.0, 0.5), {"rollout": 0, "reward": 0, "actor": 1}, lag=1)
    assert found.starts == (0, 4, 0, 2, 7)
    assert found.seconds == 7.5


def simulated(operations: Sequence[Operation], seconds: Sequence[float], pool_of: Mapping[str, int], lag: int) -> float:
    """Mean seconds per step, call by call: each waits for its needs, its pools, and the updates of the last step."""
    calls = sorted(range(len(operations)), key=lambda at: (not operations[at].is_ahead, at))
    free: dict[int, float] = {}
    ends: dict[tuple[int, int], float] = {}
    last_update, marks = 0.0, []
    for step in range(240):
        begin, last_update = last_update, 0.0
        for at in calls:
            operation = operations[at]
            places = {pool_of[operation.role]} if operation.role in pool_of else set()
            start = begin
            for need in operation.needs:
                is_of_earlier_step = operations[need].is_ahead and not operation.is_ahead
                start = max(start, ends.get((step - lag * is_of_earlier_step, need), 0.0))
                if operation.kind is PUBLISH and operations[need].kind is UPDATE and operations[need].role in pool_of:
                    places.add(pool_of[operations[need].role])
            start = max([start, *(free.get(place, 0.0) for place in places)])
            ends[step, at] = start + seconds[at]
            free |= dict.fromkeys(places, ends[step, at])
            if operation.kind is UPDATE:
                last_update = max(last_update, ends[step, at])
        marks.append(max(free.values()))
    return (marks[239] - marks[119]) / 120


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_the_length_of_a_step_that_runs_ahead_is_that_of_many_simulated_steps(seed: int, lag: int):
    random = Random(1000 * lag + seed)
    roles = ["rollout", "reward", "critic", "actor", "functions"]
    operations: list[Operation] = []
    for at in range(random.randint(3, 8)):
        role = "rollout" if at == 0 else random.choice(roles)
        needs = tuple(need for need in range(at) if random.random() < 0.5)
        is_ahead = at == 0 or (all(operations[need].is_ahead for need in needs) and random.random() < 0.5)
        kind = (
            OperationKind.forward if is_ahead or role == "functions" else random.choice([UPDATE, OperationKind.forward])
        )
        operations.append(Operation(f"{role}.{at}", role, kind, needs, is_ahead=is_ahead))
    updates = tuple(at for at, each in enumerate(operations) if each.kind is UPDATE)
    operations.append(Operation("publish", "rollout", PUBLISH, updates or (0,)))
    pool_of = {role: random.randint(0, 2) for role in roles[:-1]}
    seconds = [float(random.randint(0, 9)) for _ in operations]
    found = schedule(operations, seconds, pool_of, lag=lag)
    assert found.seconds == pytest.approx(simulated(operations, seconds, pool_of, lag), abs=1e-9)


def test_chains_are_the_longest_paths_through_needs_and_pools():
    found = chains(PPO, {"rollout": 0, "actor": 0, "reward": 1, "critic": 1})
    assert {chain.members for chain in found} == {
        frozenset(each) for each in ((0, 1, 2, 4), (0, 1, 2, 5), (0, 3, 4), (0, 3, 5))
    }
