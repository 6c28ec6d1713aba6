"""Dividing rows over ranks: every row once, siblings together, loads close, and nothing moved without need."""

import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import BatchRef, ResourcePool, WorkerGroup
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.located import Parts, pieces
from hybridflow.controller.partition import SLACK_FRACTION, divided, partition
from hybridflow.controller.tables import Taken
from hybridflow.errors import BatchError
from tests.unit.controller.workers import Model


def reference(uids: list[int], lengths: list[int]) -> BatchRef:
    tokens = Ragged.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths))
    return BatchRef.of(Batch.of(rows={"uid": torch.tensor(uids)}, tokens={"prompt_ids": tokens}), LocalBackend())


def rows_of(parts: Parts | None) -> list[list[int]]:
    assert parts is not None
    return [part.tolist() for part in parts.rows.split(parts.sizes.tolist())]


@pytest.mark.parametrize("num_parts", [2, 3, 5])
@pytest.mark.parametrize("seed", range(10))
def test_every_row_once_siblings_together_and_loads_close(num_parts, seed):
    generator = torch.Generator().manual_seed(seed)
    uids = torch.randint(0, 12, (60,), generator=generator).tolist()
    lengths = torch.randint(1, 50, (60,), generator=generator).tolist()
    parts = rows_of(partition(reference(uids, lengths), num_parts, role="actor"))
    assert sorted(row for part in parts for row in part) == list(range(60))
    assert sum(len({uids[row] for row in part}) for part in parts) == len(set(uids))
    load_of_group = {uid: sum(n for u, n in zip(uids, lengths, strict=True) if u == uid) for uid in uids}
    at_best = max(*load_of_group.values(), sum(lengths) / num_parts)
    loads = [sum(lengths[row] for row in part) for part in parts]
    assert max(loads) <= 4 / 3 * at_best


def test_rows_of_equal_length_are_consecutive():
    parts = partition(reference([i // 4 for i in range(32)], [7] * 32), 4, role="actor")
    assert rows_of(parts) == [list(range(start, start + 8)) for start in (0, 8, 16, 24)]


def test_unequal_loads_are_balanced_by_moving_groups():
    lengths = [40, 40, 1, 1, 1, 1]
    parts = partition(reference([0, 1, 2, 3, 4, 5], lengths), 2, role="actor")
    loads = [sum(lengths[row] for row in part) for part in rows_of(parts)]
    assert max(loads) <= (1 + SLACK_FRACTION) * 42


def test_balanced_rows_stay_on_the_shard_they_lie_on():
    prompts = Batch.of(
        rows={"uid": torch.arange(12)}, tokens={"prompt_ids": Ragged.from_rows([[3]] * 12, dtype=torch.int64)}
    )
    backend = LocalBackend()
    actor = WorkerGroup(Model, ResourcePool("actor", 3), backend, role="actor")
    shuffled = actor.generate(prompts).take(torch.randperm(12, generator=torch.Generator().manual_seed(0)))
    for shard, part in enumerate(rows_of(partition(shuffled, 3, role="critic"))):
        taken = Taken.by(1)
        [(runs, order, *_)] = shuffled.portion(torch.tensor(part), taken, wanted=("response_ids",)).tables
        [(slots, rows)] = pieces(runs)
        assert rows is None and order is None
        assert taken.stored[0][slots[0]] is shuffled._views[1].table.shards[shard].packets[0]


def test_unbalanced_rows_mostly_stay_on_the_shard_they_lie_on():
    backend, num_rows, ranks = LocalBackend(), 512, 8
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 40, (num_rows,), generator=draw)
    tokens = Ragged.from_lengths(torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths)
    batch = Batch.of(rows={"uid": torch.arange(num_rows) // 4}, tokens={"prompt_ids": tokens})
    whole = BatchRef.concat([BatchRef.of(own, backend) for own in batch.split([num_rows // ranks] * ranks)])
    shards = [set(range(start, start + 64)) for start in range(0, num_rows, 64)]
    assert max(int(lengths[list(shard)].sum()) for shard in shards) > 1.02 * int(lengths.sum()) / ranks
    parts = rows_of(partition(whole, ranks, role="actor"))
    assert sorted(row for part in parts for row in part) == list(range(num_rows))
    assert max(int(lengths[part].sum()) for part in parts) <= (1 + SLACK_FRACTION) * int(lengths.sum()) / ranks
    assert sum(len(set(part) - shard) for part, shard in zip(parts, shards, strict=True)) <= 16 * 4
    assert all(len({row // 4 for row in part}) * 4 == len(part) for part in parts)


def test_a_division_is_found_once_for_all_batches_of_the_same_rows():
    batch = reference([i // 4 for i in range(32)], [3, 9] * 16)
    first = divided(batch, 4, role="actor")
    assert divided(batch.join(Batch.of(rows={"scores": torch.zeros(32)})), 4, role="critic") is first
    assert divided(batch, 2, role="actor") is not first
    assert divided(batch, 4, role="actor", minibatch_rows=16) is not first
    halved = batch.take(list(range(16)))
    assert sum(map(len, rows_of(divided(halved, 4, role="actor").parts))) == 16
    longer = Ragged.from_lengths(torch.zeros(32 * 17 // 2, dtype=torch.int64), torch.tensor([16, 1] * 16))
    grown = divided(batch.join(Batch.of(tokens={"response_ids": longer})), 4, role="actor")
    assert grown is not first


def test_without_uids_rows_are_consecutive():
    batch = BatchRef.of(Batch.of(rows={"scores": torch.zeros(7)}), LocalBackend())
    assert rows_of(partition(batch, 3, role="judge")) == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(BatchError, match=r"7 rows cannot be divided over the 8 .*'judge'"):
        partition(batch, 8, role="judge")


def test_every_minibatch_is_divided_by_itself():
    lengths = [40, 1, 1, 38, 5, 5, 5, 5, 30, 2]
    division = divided(reference(list(range(10)), lengths), 2, role="actor", minibatch_rows=4)
    parts = rows_of(division.parts)
    assert [sum(rows) for rows in division.minibatch_rows] == list(map(len, parts))
    for number, expected in enumerate([{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}]):
        minibatch = []
        for part, sizes in zip(parts, division.minibatch_rows, strict=True):
            minibatch.append(torch.tensor(part).split(list(sizes))[number].tolist())
        assert set(minibatch[0]) | set(minibatch[1]) == expected
        assert not set(minibatch[0]) & set(minibatch[1])
        assert all(minibatch)


@pytest.mark.parametrize(("prompts", "longest"), [(64, 60), (8, 4000)])  # balanced by exchanges, and by moving all
@pytest.mark.parametrize("seed", range(5))
def test_minibatches_are_divided_as_each_is_alone(prompts, longest, seed):
    num_parts, size = 4, 4 * prompts
    lengths = torch.randint(1, longest, (3 * size,), generator=torch.Generator().manual_seed(seed)).tolist()
    batch = reference([row // 4 for row in range(3 * size)], lengths)
    starts = [0, size, 2 * size]
    alone = [rows_of(partition(batch.take(range(start, start + size)), num_parts, role="actor")) for start in starts]
    expected = [
        [start + row for start, parts in zip(starts, alone, strict=True) for row in parts[part]]
        for part in range(num_parts)
    ]
    division = divided(batch, num_parts, role="actor", minibatch_rows=size)
    assert rows_of(division.parts) == expected
    assert [list(sizes) for sizes in zip(*division.minibatch_rows, strict=True)] == [list(map(len, p)) for p in alone]


@pytest.mark.parametrize("seed", range(5))
def test_minibatches_of_shuffled_shards_are_balanced_and_keep_prompts_together(seed):
    num_parts, size = 4, 128
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 40, (2 * size,), generator=draw)
    shards = [
        reference([row // 4 for row in range(start, start + 64)], lengths[start : start + 64].tolist())
        for start in range(0, 2 * size, 64)
    ]
    shuffled = torch.randperm(2 * size // 4, generator=draw)
    rows = (4 * shuffled[:, None] + torch.arange(4)).flatten()
    batch = BatchRef.concat(shards).take(rows)
    division = divided(batch, num_parts, role="actor", minibatch_rows=size)
    parts = rows_of(division.parts)
    assert sorted(row for part in parts for row in part) == list(range(2 * size))
    for minibatch in range(2):
        own = [
            part[sum(sizes[:minibatch]) :][: sizes[minibatch]]
            for part, sizes in zip(parts, division.minibatch_rows, strict=True)
        ]
        assert {row // size for part in own for row in part} == {minibatch}
        assert all(len({row // 4 for row in part}) * 4 == len(part) for part in own)
        loads = [int(lengths[rows[part]].sum()) for part in own]
        assert max(loads) <= (1 + SLACK_FRACTION) * sum(loads) / num_parts


@pytest.mark.parametrize("uids", [[2**62, 2**62 + 1, 2**62, 5, 6, 5, 7, 8, 7], [0, -(2**63), 0, 1, 2, 1, 0, 3, 0]])
def test_every_uid_can_be_divided_in_minibatches(uids):
    parts = rows_of(divided(reference(uids, [1] * 9), 2, role="actor", minibatch_rows=3).parts)
    assert sorted(map(len, parts)) == [3, 6]
    own = [[(uids[row], row // 3) for row in part] for part in parts]
    assert not set(own[0]) & set(own[1])


@pytest.mark.parametrize("lengths", [[3, 3, 0, 0, 0, 0, 0, 0], [0] * 8])
def test_a_minibatch_without_tokens_is_divided(lengths):
    division = divided(reference(list(range(8)), lengths), 2, role="actor", minibatch_rows=4)
    assert sorted(row for part in rows_of(division.parts) for row in part) == list(range(8))
    assert [sum(sizes) for sizes in zip(*division.minibatch_rows, strict=True)] == [4, 4]


@pytest.mark.parametrize("minibatch_rows", [None, 2])
def test_a_batch_without_rows_has_too_few_prompts(minibatch_rows):
    batch = reference([0, 1, 2, 3], [3, 3, 3, 3])
    with pytest.raises(BatchError, match="0 prompts cannot be divided over the 2"):
        divided(batch.take([]), 2, role="actor", minibatch_rows=minibatch_rows)


def test_one_part_or_one_minibatch_is_not_cut():
    whole = reference(list(range(4)), [3, 3, 3, 3])
    assert divided(whole, 1, role="actor", minibatch_rows=2).parts is None
    assert divided(whole, 2, role="actor", minibatch_rows=4).minibatch_rows == ()
