"""One case of `resharding.py`: the ranks, each a process, and the ways from one layout to the other that they take."""

# pyright: reportPrivateImportUsage=false

import argparse
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.layouts import rollout
from benchmarks.planning import LLAMA_70B, Case, lower_bound, training_layout
from benchmarks.resharding_slicing import bytes_gathered, gather_and_slice, send_and_slice
from hybridflow.config.rollout import Transfer, TransferKind
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.models.names.rules import canonical_weights
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.boxes import contains, slices_within, volume
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.interface import TransferReport
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from hybridflow.resharding.holdings import Holding
from hybridflow.resharding.resharder import Resharder
from hybridflow.resharding.transport import group_within

Way = Callable[[], TransferReport | None]

MODELS = {
    "15M": replace(LLAMA_70B, hidden=256, layers=8, heads=8, kv_heads=8, head_dim=32, intermediate=768, vocab=16000),
    "500M": replace(
        LLAMA_70B, hidden=1024, layers=26, heads=16, kv_heads=16, head_dim=64, intermediate=4096, vocab=32000
    ),
}
FORMATS = {"15M": torch.float32, "500M": torch.bfloat16}


@dataclass(frozen=True)
class Layouts:
    """Training and generation sizes over all ranks of a case."""

    engine: str
    tensor: int
    pipeline: int
    generation_tensor: int


CASES = {
    2: {
        "fsdp 2 -> 1": Layouts("fsdp", 1, 1, 1),
        "tp 2 -> 1": Layouts("megatron", 2, 1, 1),
        "tp 2 -> 2": Layouts("megatron", 2, 1, 2),
        "fsdp 2 -> 2": Layouts("fsdp", 1, 1, 2),
    },
    4: {
        "fsdp 4 -> 2": Layouts("fsdp", 1, 1, 2),
        "tp 4 -> 2": Layouts("megatron", 4, 1, 2),
        "2x2 -> 2": Layouts("megatron", 2, 2, 2),
        "fsdp 4 -> 1": Layouts("fsdp", 1, 1, 1),
        "tp 4 -> 1": Layouts("megatron", 4, 1, 1),
        "tp 4 -> 4": Layouts("megatron", 4, 1, 4),
    },
}


def main() -> int:
    """Runs one case and prints what rank 0 found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("ranks", type=int, choices=CASES)
    parser.add_argument("case")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bucket-mb", type=int, default=Transfer().bucket_mb)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, store.port, options, answers), daemon=True)
        for rank in range(options.ranks)
    ]
    for process in ranks:
        process.start()
    while answers.empty() and all(process.exitcode is None for process in ranks):
        time.sleep(0.1)
    if answers.empty():
        return 1
    sys.stdout.write(json.dumps(answers.get()) + "\n")
    for process in ranks:
        process.join()
    return 0


def _rank(rank: int, port: int, options: argparse.Namespace, answers) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=options.ranks)
    found = measured(rank, options)
    if rank == 0:
        answers.put(found)
    dist.barrier()


def measured(rank: int, options: argparse.Namespace) -> dict:
    """Every way's seconds (of the slowest rank), bytes and memory (of the largest)."""
    sizes, dtype, size = CASES[options.ranks][options.case], FORMATS[options.model], options.ranks
    mesh = ParallelMesh(
        {
            "data": size // (sizes.tensor * sizes.pipeline),
            "pipeline": sizes.pipeline,
            "sequence": 1,
            "tensor": sizes.tensor,
        }
    )
    case = Case(options.case, MODELS[options.model], sizes.engine, mesh, 1, sizes.generation_tensor)
    copies = TRAINING_ENGINES[TrainingEngine[sizes.engine]].copies(mesh.sizes, 1)
    generating = generation_mesh(mesh, copies=copies, tensor=sizes.generation_tensor, pipeline=1)
    trained = list(map(training_layout(case), range(size)))
    wanted = list(map(rollout(case.geometry, generating), range(size)))
    slots = [_shard(holding, torch.zeros(_shape(holding), dtype=dtype)) for holding in wanted[rank]]
    bound, apart = _bound(trained[rank], slots), [_shard(h, torch.zeros(_shape(h), dtype=dtype)) for h in trained[rank]]
    neighbor = next(number for number, ranks in enumerate(micro_data_groups(generating)) if rank in ranks)

    def resharder(held: list[WeightShard], kind: TransferKind, *, verify: bool = False) -> Resharder:
        assert dist.group.WORLD is not None
        return Resharder(
            lambda: held,
            {slot.name: slot for slot in slots},
            group=group_within(dist.group.WORLD, timeout_seconds=120.0, device="cpu"),
            transfer=Transfer(executor=kind, verify=verify, bucket_mb=options.bucket_mb),
            neighbor=neighbor,
        )

    in_place, copied = resharder(bound, TransferKind.auto), resharder(apart, TransferKind.auto)
    shared = resharder(bound, TransferKind.shared_memory)
    verified = resharder(apart, TransferKind.auto, verify=True)
    one, other = (torch.ones(sum(slot.tensor.numel() for slot in slots), dtype=dtype) for _ in range(2))
    ways: dict[str, Way] = {
        "in place": lambda: in_place.transfer(1),
        "copied": lambda: copied.transfer(1),
        "shared memory": lambda: shared.transfer(1),
        "verified": lambda: verified.transfer((verified.version or 0) + 1),
        "gather and slice": lambda: gather_and_slice(rank, trained, apart, slots),
        "send and slice": lambda: send_and_slice(rank, trained, apart, slots),
        "memory copy": lambda: _copied(one, other),
    }
    for number, shard in enumerate([*apart, *bound]):
        shard.tensor.fill_(rank + number % 50)
    plan = verified.plan
    return {
        "model_bytes": dtype.itemsize
        * sum(math.prod(spec.shape) for spec in canonical_weights(case.geometry).values()),
        "bytes_received": [plan.bytes_received(each) for each in range(size)],
        "lower_bound": [lower_bound(plan, each) for each in range(size)],
        "bytes_of_others": bytes_gathered(trained, dtype.itemsize),
        "bytes_wanted": [sum(volume(h.box) * dtype.itemsize for h in held) for held in wanted],
        "executor": verified.executor.name,
        "ways": _timed(ways, options.repeats),
    }


def _timed(ways: dict[str, Way], repeats: int) -> dict:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, int] = {}
    reports: dict[str, TransferReport | None] = {}
    for number in range(repeats + 1):
        for name, way in ways.items():
            dist.barrier()
            before = _reset_peak()
            began = time.perf_counter()
            reports[name] = way()
            elapsed = time.perf_counter() - began
            grown = _peak() - before
            numbers = torch.tensor([elapsed, grown], dtype=torch.float64)
            dist.all_reduce(numbers, dist.ReduceOp.MAX)
            if number:  # the first is a warm-up
                seconds[name].append(float(numbers[0]))
            memory[name] = max(memory.get(name, 0), int(numbers[1]))
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "all_seconds": seconds[name],
            "peak_bytes": memory[name],
            "report": asdict(report) if report else None,
        }
        for name, report in reports.items()
    }


def _bound(trained: Iterable[Holding], slots: Iterable[WeightShard]) -> list[WeightShard]:
    """The weights that a rank trains, as views of its slots wherever a slot contains them."""
    slot_of = {slot.name: slot for slot in slots}
    held = []
    for holding in trained:
        slot = slot_of.get(holding.name)
        if slot is not None and contains(slot.layout.box, holding.box) and volume(holding.box):
            held.append(_shard(holding, slot.tensor[slices_within(holding.box, slot.layout.box)]))
        else:
            dtype = next(iter(slot_of.values())).tensor.dtype
            held.append(_shard(holding, torch.zeros(_shape(holding), dtype=dtype)))
    return held


def _shard(holding: Holding, tensor: torch.Tensor) -> WeightShard:
    return WeightShard(holding.name, tensor, TensorLayout(holding.shape, holding.box))


def _shape(holding: Holding) -> list[int]:
    return [high - low for low, high in holding.box]


def _copied(source: torch.Tensor, destination: torch.Tensor) -> None:
    destination.copy_(source)


def _reset_peak() -> int:
    """Starts to measure the peak of this process's memory; bytes it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
