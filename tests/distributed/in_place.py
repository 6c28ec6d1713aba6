"""Where the trained weights of a rank lie, beside the memory that generates."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from hybridflow.config.rollout import Rollout
from hybridflow.config.training import Training
from hybridflow.parallel.layout import WeightShard
from tests.distributed.hybrid import actor_on_rank, all_prompts, own_prompts, sampled


@dataclass(frozen=True)
class Memory:
    """What a transfer did over all ranks, in bytes, and what this rank's memory says of it."""

    moved: int
    copied: int
    aliased: int
    wanted: int
    """Bytes of this rank's slots."""

    shared: int
    """Bytes of this rank's trained weights that lie in its slots' memory, element by element."""

    seen: int
    """Bytes of the slots that an optimizer step changed before anything was published."""


def memory_of_weights(rank: int, directory: Path, training: Training, rollout: Rollout, num_ranks: int) -> Memory:
    """A rank program: publishes, looks where weights lie, and trains a step without publishing."""
    worker = actor_on_rank(rank, directory, training, rollout, num_ranks)
    assert worker.rollout is not None
    worker.publish_weights(0)
    report = {name: int(measure.value) for name, measure in worker.weights.drain_metrics().items()}
    slots = worker.rollout.engine.weight_slots()
    shared = sum(
        _shared_bytes(shard, slots[shard.name]) for shard in worker.engine.weight_shards() if shard.name in slots
    )
    batch = sampled(worker, all_prompts(), own_prompts(worker))
    before = {name: slot.tensor.clone() for name, slot in slots.items()}
    worker.update(batch)
    changed = [(slot.tensor != before[name]).sum() * slot.tensor.element_size() for name, slot in slots.items()]
    return Memory(
        moved=report["reshard/bytes_moved"],
        copied=report["reshard/bytes_copied"],
        aliased=report["reshard/bytes_aliased"],
        wanted=sum(slot.tensor.nbytes for slot in slots.values()),
        shared=shared,
        seen=int(sum(changed)),
    )


def _shared_bytes(shard: WeightShard, slot: WeightShard) -> int:
    """Bytes of the box that both hold, where each element has one address in both; else 0."""
    box = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(shard.layout.box, slot.layout.box, strict=True)]
    if any(low >= high for low, high in box):
        return 0
    ours, theirs = _region(shard, box), _region(slot, box)
    same = ours.data_ptr() == theirs.data_ptr() and ours.stride() == theirs.stride()
    return ours.numel() * ours.element_size() if same else 0


def _region(shard: WeightShard, box: list[tuple[int, int]]) -> Tensor:
    starts = (low for low, _ in shard.layout.box)
    return shard.tensor[tuple(slice(low - at, high - at) for (low, high), at in zip(box, starts, strict=True))]
