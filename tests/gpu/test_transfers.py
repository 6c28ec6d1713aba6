"""Weights that go from process to process, and within one, on a GPU."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.config.rollout import TransferKind
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.cuda_ipc import CudaIpcExecutor
from hybridflow.resharding.executors.interface import ExecutorSetup
from hybridflow.resharding.executors.local import LocalExecutor
from hybridflow.resharding.executors.shared_memory import SharedMemoryExecutor
from hybridflow.resharding.plan import make_plan
from hybridflow.resharding.transport import Transport, group_within
from hybridflow.resharding.views import OwnPieces
from tests.spmd import run_ranks
from tests.unit.resharding.random_weights import holdings_of

ROWS, COLUMNS = 96, 40


def shards(tensor: torch.Tensor, first: int, last: int) -> list[WeightShard]:
    """Two weights with rows of a matrix each, in one memory."""
    layout = TensorLayout((ROWS, COLUMNS), ((first, last), (0, COLUMNS)))
    return [WeightShard(name, tensor[index], layout) for index, name in enumerate(("left", "right"))]


def values(version: int) -> torch.Tensor:
    return torch.randn(2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(version))


def transfers(rank: int, kind: str) -> list[bool]:
    """Both ranks train half of the rows and generate with all: three versions, in the same memory and in new."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    assert dist.group.WORLD is not None
    transport = group_within(dist.group.WORLD, timeout_seconds=60.0, device="cpu")
    bounds = [(0, ROWS // 3), (ROWS // 3, ROWS)]
    (low, high), found = bounds[rank], []
    trained = torch.zeros(2, high - low, COLUMNS, device=device)
    slots = torch.zeros(2, ROWS, COLUMNS, device=device)
    held = [holdings_of(shards(torch.empty(2, b - a, COLUMNS, device="meta"), a, b)) for a, b in bounds]
    plan = make_plan(held, [holdings_of(shards(slots, 0, ROWS))] * 2)
    dtypes = {"left": torch.float32, "right": torch.float32}
    own = OwnPieces(plan, rank)
    setup = ExecutorSetup(plan, own, transport, dtypes, TransferKind.auto, 1 << 20, ["node"] * 2)
    executor = CudaIpcExecutor(setup, device) if kind == "cuda" else SharedMemoryExecutor(setup)
    for version in range(4):
        if version == 2:
            trained = torch.zeros_like(trained)
        trained.copy_(values(version)[:, low:high])
        report = executor.run(shards(trained, low, high), shards(slots, 0, ROWS))
        found.append(torch.equal(slots.cpu(), values(version)) and report.bytes_moved == own.bytes_received)
    return found


def test_two_processes_of_one_device_read_one_anothers_weights(device):
    assert run_ranks(transfers, 2, device.type) == [[True] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rank_alone_copies_what_is_not_in_place(device, dtype):
    trained = torch.randn(2, ROWS, COLUMNS, device=device)
    slots = torch.zeros(2, ROWS, COLUMNS, device=device, dtype=dtype)
    own, wanted = shards(trained, 0, ROWS), shards(slots, 0, ROWS)
    if dtype is torch.float32:
        own[0] = wanted[0]
    plan = make_plan([[h._replace(itemsize=dtype.itemsize) for h in holdings_of(own)]], [holdings_of(wanted)])
    dtypes = dict.fromkeys(("left", "right"), dtype)
    setup = ExecutorSetup(plan, OwnPieces(plan, 0), Transport.alone(), dtypes, TransferKind.local, 1 << 20, ["node"])
    report = LocalExecutor(setup).run(own, wanted)
    assert torch.equal(slots[1], trained[1].to(dtype))
    size = ROWS * COLUMNS * dtype.itemsize
    is_bound = dtype is torch.float32
    assert (report.bytes_copied, report.bytes_aliased) == (size * (2 - is_bound), size * is_bound)
