"""The baseline: gathers every weight on every rank, tensor by tensor, and slices the rank's part."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.boxes import Box, slices_within, volume
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.holdings import Holding


class Parts(NamedTuple):
    """One weight: its shape, and its different parts with the first rank that holds each."""

    shape: tuple[int, ...]
    holder_of: dict[Box, int]


def gather_and_slice(
    rank: int, trained: Sequence[Sequence[Holding]], held: Iterable[WeightShard], slots: Iterable[WeightShard]
) -> None:
    """With collectives: an all-gather where all ranks hold a part of one shape, else a broadcast of each part."""
    own, world = {shard.name: shard for shard in held}, dist.get_world_size()
    for slot in slots:
        parts = _parts(trained, slot.name)
        whole = torch.empty(parts.shape, dtype=slot.tensor.dtype)
        everywhere = tuple((0, size) for size in parts.shape)
        if len(parts.holder_of) == 1 and _is_everywhere(trained, slot.name):
            whole = own[slot.name].tensor
        elif len(parts.holder_of) == world and len({_shape(box) for box in parts.holder_of}) == 1:
            _all_gather(own[slot.name].tensor, parts, whole)
        else:
            for box, holder in parts.holder_of.items():
                part = own[slot.name].tensor if holder == rank else torch.empty(_shape(box), dtype=whole.dtype)
                dist.broadcast(part, holder)
                whole[slices_within(box, everywhere)] = part
        slot.tensor.copy_(whole[slices_within(slot.layout.box, everywhere)])


def send_and_slice(
    rank: int, trained: Sequence[Sequence[Holding]], held: Iterable[WeightShard], slots: Iterable[WeightShard]
) -> None:
    """The same point to point, which is much faster with gloo than its own collectives."""
    own, world = {shard.name: shard for shard in held}, dist.get_world_size()
    for slot in slots:
        parts = _parts(trained, slot.name)
        everywhere = tuple((0, size) for size in parts.shape)
        if len(parts.holder_of) == 1 and _is_everywhere(trained, slot.name):
            slot.tensor.copy_(own[slot.name].tensor[slices_within(slot.layout.box, everywhere)])
            continue
        whole = torch.empty(parts.shape, dtype=slot.tensor.dtype)
        found, works = {}, []
        for number, (box, holder) in enumerate(parts.holder_of.items()):
            found[box] = own[slot.name].tensor if holder == rank else torch.empty(_shape(box), dtype=whole.dtype)
            if holder != rank:
                works.append(dist.irecv(found[box], holder, tag=number))
            else:
                works += [dist.isend(found[box], other, tag=number) for other in range(world) if other != rank]
        for work in works:
            work.wait()
        for box, part in found.items():
            whole[slices_within(box, everywhere)] = part
        slot.tensor.copy_(whole[slices_within(slot.layout.box, everywhere)])


def bytes_gathered(trained: Sequence[Sequence[Holding]], itemsize: int) -> int:
    """Bytes that the rank which holds least receives so: all that it does not hold."""
    whole = {holding.name: math.prod(holding.shape) for holdings in trained for holding in holdings}
    least = min(sum(volume(holding.box) for holding in holdings) for holdings in trained)
    return (sum(whole.values()) - least) * itemsize


def _all_gather(part: Tensor, parts: Parts, whole: Tensor) -> None:
    """Directly into the whole tensor if its parts are rows; otherwise concatenated in a buffer first."""
    dim = next((dim for dim, (low, high) in enumerate(next(iter(parts.holder_of))) if high - low < parts.shape[dim]), 0)
    if dim == 0:
        dist.all_gather(list(whole.chunk(dist.get_world_size())), part)
        return
    gathered = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, part)
    torch.cat(gathered, dim=dim, out=whole)


def _parts(trained: Sequence[Sequence[Holding]], name: str) -> Parts:
    if name not in _known:
        shape, holder_of = (), {}
        for rank, holdings in enumerate(trained):
            for holding in holdings:
                if holding.name == name:
                    shape = holding.shape
                    holder_of.setdefault(holding.box, rank)
        _known[name] = Parts(shape, holder_of)
    return _known[name]


def _is_everywhere(trained: Sequence[Sequence[Holding]], name: str) -> bool:
    if name not in _everywhere:
        _everywhere[name] = all(any(holding.name == name for holding in holdings) for holdings in trained)
    return _everywhere[name]


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


_known: dict[str, Parts] = {}
_everywhere: dict[str, bool] = {}
