"""What the ranks of the resharding tests do, each in a process of its own."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

from hybridflow.config.rollout import Transfer, TransferKind
from hybridflow.errors import HybridflowError, StaleWeightsError
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding.executors.factory import make_executor
from hybridflow.resharding.executors.gather import GatherExecutor
from hybridflow.resharding.executors.interface import Executor, ExecutorSetup, TransferReport
from hybridflow.resharding.resharder import Resharder
from hybridflow.resharding.transport import Transport, group_within
from tests.unit.resharding.random_weights import Weight, by_name, random_weights

Make = Callable[[ExecutorSetup], Executor]


@dataclass
class Outcome:
    """What a rank saw of one plan."""

    is_right: list[bool]
    """After each version."""
    report: TransferReport
    """Of the last version."""
    bytes_planned: int
    executor: TransferKind


@dataclass(frozen=True)
class Sized:
    """Executors with buckets below a megabyte; gathers by collectives, which is otherwise for GPUs."""

    bucket_bytes: int
    is_collective: bool = False

    def __call__(self, setup: ExecutorSetup) -> Executor:
        sized = replace(setup, bucket_bytes=self.bucket_bytes)
        return GatherExecutor(sized, is_collective=True) if self.is_collective else make_executor(sized)


def random_plans(rank: int, seeds: Sequence[int], makes: Sequence[tuple[TransferKind, Make]]) -> list[Outcome]:
    """Two versions for each seed and executor: of colocated ranks, and with those in front training for the others."""
    size = dist.get_world_size()
    assert dist.group.WORLD is not None
    group = group_within(dist.group.WORLD, timeout_seconds=60.0, device="cpu")
    outcomes = []
    for number, (seed, (kind, make), middle) in enumerate(product(seeds, makes, (0, size // 2))):
        sources, destinations = range(middle or size), range(middle, size)
        weights = random_weights(seed, sources=sources, destinations=destinations, num_ranks=size)
        own = replace(group, store=dist.PrefixStore(str(number), group.store))
        outcomes.append(outcome(rank, weights, kind, make, group=own))
    return outcomes


def nested(rank: int, makes: Sequence[Make]) -> list[Outcome]:
    """Four ranks train in four row or column parts each and generate in two: two ranks give each other all."""
    size, parts = dist.get_world_size(), dist.get_world_size() // 2
    weights: list[Weight] = []
    for name, shape, dim in (("rows", (512, 256), 0), ("columns", (64, 96), 1), ("thin rows", (8, 3), 0)):
        held = [[_part(shape, dim, number, size)] for number in range(size)]
        wanted = [[_part(shape, dim, number // 2, parts)] for number in range(size)]
        weights.append(Weight(name, torch.randn(shape), held, wanted, torch.float32))
    everywhere = [[((0, 64),)]] * size
    weights.append(Weight("norm", torch.randn(64), everywhere, everywhere, torch.float32))
    for weight in weights:
        dist.broadcast(weight.values, 0)
    return [outcome(rank, weights, TransferKind.auto, make, neighbor=rank // 2) for make in makes]


def outcome(
    rank: int,
    weights: list[Weight],
    kind: TransferKind,
    make: Make,
    *,
    neighbor: int | None = None,
    group: Transport | None = None,
) -> Outcome:
    """Transfers two versions, with an optimizer step in place between them."""
    held = [shard for weight in weights for shard in weight.trained(rank)]
    slots = [shard for weight in weights for shard in weight.slots(rank)]
    resharder = Resharder(
        lambda: held,
        by_name(slots),
        group=group or dist.group.WORLD,
        transfer=Transfer(executor=kind, timeout_seconds=60.0),
        neighbor=neighbor,
        make=make,
    )
    reports, is_right = [], []
    for version in (1, 2):
        reports.append(resharder.transfer(version))
        is_right.append(resharder.version == version and all(weight.is_there(slots) for weight in weights))
        for tensor in [shard.tensor for shard in held] + [weight.values for weight in weights]:
            tensor.add_(1)
    return Outcome(is_right, reports[-1], resharder.plan.bytes_received(rank), resharder.executor)


class Faulty:
    """An executor after which one bit of one slot on one rank is not what was sent."""

    def __init__(self, setup: ExecutorSetup, *, rank: int, slot: int) -> None:
        self._slot = slot if setup.transport.rank == rank else None
        self._run = make_executor(setup).run

    def run(self, source: Iterable[WeightShard], destination: Iterable[WeightShard]) -> TransferReport:
        """What another executor does, and a fault."""
        slots = list(destination)
        report = self._run(source, slots)
        if self._slot is not None:
            slots[self._slot].tensor.flatten()[-1:].view(torch.int32).bitwise_xor_(1 << 17)
        return report


def corrupted(rank: int) -> tuple[str, bool, str]:
    """The error about a weight that arrives damaged, whether the slots count as complete, and the error if not."""
    shape = (4, 8)
    held = [WeightShard("w", torch.ones(2, 8), TensorLayout(shape, ((2 * rank, 2 * rank + 2), (0, 8))))]
    slots, make = [WeightShard.full("w", torch.zeros(shape))], partial(Faulty, rank=1, slot=0)
    resharder = Resharder(lambda: held, by_name(slots), group=dist.group.WORLD, transfer=Transfer(), make=make)
    with pytest.raises(StaleWeightsError) as damage:
        resharder.transfer(7)
    with pytest.raises(HybridflowError) as refusal:
        resharder.require_complete()
    return str(damage.value), resharder.is_complete, str(refusal.value)


def aliased(rank: int) -> TransferReport:
    """Trained rows are views of the rows of the slot: only what the other rank holds moves."""
    slot = torch.zeros(4, 8)
    own = slot[2 * rank : 2 * rank + 2]
    own.fill_(rank + 1)
    shape = (4, 8)
    held = [WeightShard("w", own, TensorLayout(shape, ((2 * rank, 2 * rank + 2), (0, 8))))]
    slots = {"w": WeightShard.full("w", slot)}
    report = Resharder(lambda: held, slots, group=dist.group.WORLD, transfer=Transfer()).transfer(1)
    assert slot[:, 0].tolist() == [1, 1, 2, 2], slot
    return report


def _part(shape: tuple[int, int], dim: int, number: int, parts: int) -> tuple[tuple[int, int], ...]:
    low, high = shape[dim] * number // parts, shape[dim] * (number + 1) // parts
    return tuple((low, high) if place == dim else (0, size) for place, size in enumerate(shape))
