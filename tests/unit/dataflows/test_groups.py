"""Which groups a step trains on, on a virtual clock: staleness, accounts, length bias, stragglers, throughput."""

import random
from itertools import pairwise, product

import pytest

from benchmarks.asynchrony_model import mean_seconds, simulated, tailed
from hybridflow.config.asynchrony import WhenStale
from hybridflow.dataflows.groups import GroupQueue, GroupState, collectable, least_loaded

B = 4


def drawn_lengths(seed: int):
    """Group lengths from 1 to 400 tokens, most of them short."""
    return lambda uid: max(1, int(400 * random.Random(f"{seed}/{uid}").random() ** 4))


@pytest.mark.parametrize("seed", range(30))
def test_t4_no_group_is_too_old_lost_or_doubled(seed):
    chance = random.Random(seed)
    staleness = chance.randint(1, 5)
    depth, policy = chance.randint(1, staleness), chance.choice([*WhenStale])
    learn, overlaps = chance.choice([0, 10, 60, 300]), chance.random() < 0.5
    queue = GroupQueue(B, depth, staleness, 60, policy)
    steps = simulated(drawn_lengths(seed), queue, learn_seconds=learn, overlaps=overlaps)
    used = [uid for step in steps for uid in step.uids]
    dropped = [uid for step in steps for uid in step.dropped]
    if policy is not WhenStale.mask:
        assert max(step.staleness for step in steps) <= staleness
    assert max(step.in_flight for step in steps) <= (depth + 1) * B
    assert len(used) == 60 * B and len({*used, *dropped}) == len(used) + len(dropped)
    if policy is WhenStale.wait:
        assert not dropped and sorted(used) == list(range(60 * B))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("learn", [0, 50, 200])
def test_t4_more_groups_ahead_take_no_longer(seed, learn):
    queues = [GroupQueue(B, depth, 6, 80) for depth in range(1, 7)]
    seconds = [mean_seconds(simulated(drawn_lengths(seed), queue, learn_seconds=learn)) for queue in queues]
    slack = 16  # a step looks every 16 tokens at which groups have finished
    assert all(later <= earlier + slack for earlier, later in pairwise(seconds)), seconds
    assert seconds[-1] < 0.9 * seconds[0] or seconds[0] <= learn + slack


def test_t5_waiting_trains_on_slow_and_fast_prompts_as_often_as_they_are_drawn():
    lengths = tailed(0.25, 20, 200)
    drawn = [lengths(uid) == 200 for uid in range(200 * B)]
    steps = simulated(lengths, GroupQueue(B, 2, 3, 200))
    slow = [lengths(uid) == 200 for step in steps for uid in step.uids]
    assert sum(slow) == sum(drawn)  # at the end of the run; the groups in flight are the only difference before
    for step in range(20, 200):
        assert abs(sum(slow[: step * B]) - sum(drawn[: step * B])) <= 3 * B


def test_t5_dropping_what_is_too_old_trains_on_fewer_slow_prompts():
    lengths = tailed(0.25, 20, 200)
    steps = simulated(lengths, GroupQueue(B, 1, 1, 200, WhenStale.drop))
    slow = [lengths(uid) == 200 for step in steps for uid in step.uids]
    dropped = [uid for step in steps for uid in step.dropped]
    assert sum(slow) / len(slow) < 0.15 and dropped and all(lengths(uid) == 200 for uid in dropped)


def test_t10_a_straggler_that_never_ends_is_replaced_at_its_deadline():
    def lengths(uid: int) -> int:
        return 10**9 if uid == 3 else 20

    steps = simulated(lengths, GroupQueue(B, 1, 2, 10), deadline_tokens=100)
    assert [step.dropped for step in steps if step.dropped] == [(3,)]
    assert sorted(uid for step in steps for uid in step.uids) == [uid for uid in range(10 * B + 1) if uid != 3]


def test_a_step_waits_for_old_groups_that_later_steps_could_not_all_take():
    queue = GroupQueue(groups_per_step=2, depth=2, max_staleness=2, total_steps=9)
    queue.add(range(6))
    assert len(queue.admit(0)) == 6 and queue.room(0) == 0
    for uid in (4, 5):
        queue.finish(uid, 0)
    first = queue.chosen(0)
    assert first is not None and [group.uid for group in first] == [4, 5]
    queue.remove(first)
    queue.add(range(6, 8))
    assert [group.uid for group in queue.admit(1)] == [6, 7]
    for uid in (6, 7):
        queue.finish(uid, 1)
    assert queue.chosen(1) is None  # groups 0 to 3 are due at steps 1 and 2
    queue.finish(3, 0)
    assert queue.chosen(1) is None
    queue.finish(0, 0)
    chosen = queue.chosen(1)
    assert chosen is not None and [group.uid for group in chosen] == [0, 3]


def test_dropping_makes_room_for_exactly_as_many_groups():
    queue = GroupQueue(groups_per_step=2, depth=1, max_staleness=1, total_steps=9, when_stale=WhenStale.drop)
    queue.add(range(8))
    queue.admit(0)
    assert not queue.stale(1)
    assert [group.uid for group in queue.stale(2)] == [0, 1, 2, 3]
    queue.remove(queue.stale(2)[:1])
    assert [group.uid for group in queue.admit(2)] == [4]
    assert len(queue.of(GroupState.running)) == 4


def test_at_the_end_of_a_run_no_group_begins_that_no_step_would_train_on():
    queue = GroupQueue(groups_per_step=2, depth=3, max_staleness=3, total_steps=3)
    queue.add(range(20))
    assert len(queue.admit(0)) == 6
    assert len(queue.admit(1, depth=0)) == 0


def test_each_rank_gets_a_group_whenever_some_are_collected():
    for least, count, left in product(range(1, 5), range(8), range(8)):
        for running in range(left + 1):
            taken = collectable([*range(count)][::-1], running=running, left=left, least=least)
            later = count - len(taken) + left
            assert taken == [*range(len(taken))] and (not taken or len(taken) >= least)
            assert not taken or not later or later >= least
            if count >= least and (not left or running >= least):
                assert len(taken) == count


def test_groups_go_to_the_replica_with_the_fewest_rows():
    assert least_loaded([4, 0, 2], [2, 2, 2, 2]) == [1, 1, 2, 0]
