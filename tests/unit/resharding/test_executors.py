"""Every executor brings every piece of any plan to its place, in any bucket, and counts the bytes of the plan."""

import json
import time

import pytest
import torch
import torch.distributed as dist

from hybridflow.config.rollout import TransferKind
from hybridflow.errors import ConfigError, EngineError
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.cuda_ipc import Handle, SharedMemories
from hybridflow.resharding.executors.factory import executor_kind, make_executor
from hybridflow.resharding.executors.interface import ExecutorSetup
from hybridflow.resharding.plan import ReshardPlan, make_plan
from hybridflow.resharding.transport import Transport, _poll, group_within
from hybridflow.resharding.views import OwnPieces
from tests.spmd import run_ranks
from tests.unit.resharding.random_weights import holdings_of
from tests.unit.resharding.resharding_programs import Sized, aliased, nested, random_plans

SMALL, TINY = 64 << 10, 1024
"""Buckets that hold all of a test's weights, and buckets smaller than one weight."""


def check(outcomes):
    for ranks in outcomes:
        for found in ranks:
            assert found.is_right == [True, True], found
            assert found.report.bytes_moved == found.bytes_planned
            assert found.report.bytes_aliased == 0


KINDS = [TransferKind.send_recv, TransferKind.shared_memory]


def test_executors_carry_out_random_plans():
    makes = [*((kind, Sized(TINY)) for kind in KINDS), (TransferKind.auto, Sized(SMALL))]
    makes += [(TransferKind.gather, Sized(bucket_bytes, is_collective=True)) for bucket_bytes in (SMALL, TINY)]
    check(run_ranks(random_plans, 4, [0], makes))


def test_executors_carry_out_random_plans_of_two_ranks_with_little_staging():
    makes = [(TransferKind.send_recv, Sized(TINY)), (TransferKind.shared_memory, Sized(SMALL))]
    outcomes = run_ranks(random_plans, 2, range(3, 5), makes)
    check(outcomes)
    sent = [found for ranks in outcomes for found in ranks if found.executor is TransferKind.send_recv]
    assert 0 < max(found.report.staging_bytes for found in sent) <= 4 * TINY


def test_nested_layouts_are_gathered():
    quarter = (512 * 256 + 64 * 96 + 8 * 3) * 4 // 4
    outcomes = run_ranks(nested, 4, [Sized(SMALL), Sized(SMALL, True), Sized(TINY, True)])
    check(outcomes)
    for found in (found for ranks in outcomes for found in ranks):
        assert (found.report.bytes_moved, found.report.bytes_copied) == (quarter, quarter + 64 * 4)
        assert found.executor is TransferKind.gather


def test_what_is_in_place_moves_and_copies_nothing():
    for report in run_ranks(aliased, 2):
        assert (report.bytes_moved, report.bytes_copied, report.bytes_aliased) == (64, 0, 64)


def rows(tensor: torch.Tensor) -> WeightShard:
    return WeightShard.full("w", tensor)


def setup_of(plan: ReshardPlan, kind: TransferKind, *, nodes=("a",)) -> ExecutorSetup:
    return ExecutorSetup(plan, OwnPieces(plan, 0), Transport.alone(), {"w": torch.float32}, kind, 1 << 20, nodes)


def local(held: WeightShard, wanted: WeightShard):
    plan = make_plan([holdings_of([held])], [holdings_of([wanted])])
    return make_executor(setup_of(plan, TransferKind.local)).run([held], [wanted])


def test_equal_memory_with_a_dimension_of_one_is_in_place():
    slot = torch.zeros(1, 6)
    report = local(rows(slot.as_strided((1, 6), (99, 1))), rows(slot))
    assert (report.bytes_copied, report.bytes_aliased) == (0, 24)


def test_memory_that_overlaps_in_part_or_in_another_format_is_refused():
    memory = torch.zeros(10)
    for held in (memory[:6], memory[4:].view(torch.int32)):
        with pytest.raises(EngineError, match=r"\[0:6\] of 'w' overlap in memory.*Bind the parameter"):
            local(rows(held), rows(memory[4:]))


def test_interleaved_views_of_one_memory_are_copied():
    memory = torch.arange(24, dtype=torch.float32).view(4, 6)
    report = local(rows(memory[:, :3]), rows(memory[:, 3:]))
    assert (report.bytes_copied, report.bytes_aliased) == (48, 0)
    assert torch.equal(memory[:, 3:], memory[:, :3])


def test_a_weight_no_longer_held_is_named():
    slot = rows(torch.zeros(6))
    plan = make_plan([holdings_of([slot])], [holdings_of([slot])])
    part = WeightShard("w", torch.zeros(4), TensorLayout((6,), ((0, 4),)))
    with pytest.raises(EngineError, match=r"\[0:6\] of 'w' from rank 0 to rank 0, but this rank no longer has it"):
        make_executor(setup_of(plan, TransferKind.local)).run([part], [slot])


def setup(kind: TransferKind, *, nodes=("a", "a"), together: bool = True) -> ExecutorSetup:
    whole = [holdings_of([rows(torch.zeros(6))])]
    plan = make_plan([*whole, ()], [(), *whole]) if together else make_plan(whole * 2, whole * 2)
    return setup_of(plan, kind, nodes=nodes)


def test_auto_is_local_where_nothing_is_received_and_send_recv_for_any_plan():
    assert executor_kind(setup(TransferKind.auto, together=False)) is TransferKind.local
    assert executor_kind(setup(TransferKind.auto)) is TransferKind.send_recv


@pytest.mark.parametrize(
    ("kind", "nodes", "message", "remedy"),
    [
        (TransferKind.local, ("a", "a"), "must be sent from rank 0 to rank 1", "rollout.transfer.executor=auto"),
        (TransferKind.shared_memory, ("a", "b"), "=shared_memory needs all ranks on one machine; they are on a, b", ""),
        (TransferKind.cuda_ipc, ("a", "b"), "=cuda_ipc needs all ranks on one machine; they are on a, b", ""),
        (TransferKind.cuda_ipc, ("a", "a"), "these ranks run on CPU", "shared_memory"),
    ],
)
def test_an_executor_that_cannot_carry_out_the_plan_is_refused(kind, nodes, message, remedy):
    with pytest.raises((ConfigError, EngineError), match=message) as caught:
        make_executor(setup(kind, nodes=nodes)).run([rows(torch.zeros(6))], [])
    assert remedy in caught.value.remedy


def test_a_handle_of_a_gpus_memory_travels_as_plain_data():
    memory = (b"handle\x00\xff", 4096, 512, False, b"counter", 64, b"event", True)
    handle = Handle("w", TensorLayout((4, 3), ((2, 4), (0, 3))), "GPU-1", ((2, 3), (3, 1), 7, torch.bfloat16, *memory))
    assert Handle.from_plain(*json.loads(json.dumps(handle.to_plain()))) == handle


def test_the_memory_of_weights_is_shared_once_as_long_as_it_stays_where_it_is():
    made: list[int] = []

    def make(tensor: torch.Tensor) -> tuple:
        made.append(tensor.untyped_storage().data_ptr())
        return (len(made),)

    memories = SharedMemories(make)
    buffer, other = torch.zeros(64), torch.zeros(8)
    for _ in range(3):
        assert [memories.handle(tensor) for tensor in (buffer[:8], buffer[8:], other)] == [(1,), (1,), (2,)]
    del other
    assert memories.handle(torch.zeros(8)) == (3,)
    assert len(memories._known) == 2
    buffer.untyped_storage().resize_(1 << 22)
    assert memories.handle(buffer) == (4,)


def poll_works(rank: int) -> None:
    """Polls a work that ends well, and one whose peer is gone."""
    assert dist.group.WORLD is not None
    transport = group_within(dist.group.WORLD, timeout_seconds=60.0, device="cpu")
    assert transport.group is not None
    mine = torch.ones(4, dtype=torch.uint8)
    _poll(transport.group.allreduce([mine]), time.monotonic() + 30)
    assert mine.tolist() == [2] * 4
    if rank == 1:
        transport.abort()
        return
    with pytest.raises(RuntimeError):
        _poll(transport.group.allreduce([mine]), time.monotonic() + 30)


def test_a_polled_work_raises_what_went_wrong_and_torch_does_not_warn(capfd):
    run_ranks(poll_works, 2, may_die=True)
    assert "deprecated" not in capfd.readouterr().err


LONG = b"layout" * 50_000


def messages(rank: int) -> tuple[list[list[bytes]], bool, list]:
    assert dist.group.WORLD is not None
    transport = group_within(dist.group.WORLD, timeout_seconds=60.0, device="cpu")
    received = [
        transport.gather_messages(own) for own in (LONG if rank else b"another", b"", b"\x00\xff" * rank, bytes([rank]))
    ]
    return received, received[0][1] is received[0][2], transport.gather_plain({"rank": rank, "box": ((0, rank),)})


def test_every_rank_hears_all_and_what_is_alike_once():
    for received, is_one, plain in run_ranks(messages, 3):
        assert received[0] == [b"another", LONG, LONG] and is_one
        assert received[1:] == [[b"", b"", b""], [b"", b"\x00\xff", b"\x00\xff" * 2], [b"\x00", b"\x01", b"\x02"]]
        assert plain == [{"rank": rank, "box": [[0, rank]]} for rank in range(3)]


def test_a_rank_alone_hears_itself():
    alone = Transport.alone()
    assert alone.gather_messages(b"own") == [b"own"] and alone.gather_plain((1, None)) == [[1, None]]
