"""Random weights in two random layouts, the same on every rank of a test: cut in rows, columns or parts, uneven."""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hybridflow.parallel.boxes import Box, volume
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.resharding import Holding

RankBoxes = list[list[Box]]
"""The boxes of one weight on each rank."""

UNTOUCHED = -77.0
"""A number that no weight has."""


@dataclass
class Weight:
    """One weight with its values, and where it lies before and after."""

    name: str
    values: Tensor
    held: RankBoxes
    wanted: RankBoxes
    wanted_dtype: torch.dtype

    def trained(self, rank: int) -> list[WeightShard]:
        """What a rank holds: copies, some of them as columns of a wider tensor."""
        return [self._shard(box, self._part(box).clone()) for box in self.held[rank]]

    def slots(self, rank: int) -> list[WeightShard]:
        """What a rank wants, not yet filled."""
        return [
            self._shard(box, torch.full_like(self._part(box), UNTOUCHED, dtype=self.wanted_dtype))
            for box in self.wanted[rank]
        ]

    def is_there(self, slots: Iterable[WeightShard]) -> bool:
        """The slots hold this weight's values, bit by bit."""
        return all(
            torch.equal(_bits(slot.tensor), _bits(self._part(slot.layout.box).to(self.wanted_dtype)))
            for slot in slots
            if slot.name == self.name
        )

    def _part(self, box: Box) -> Tensor:
        return self.values[tuple(slice(low, high) for low, high in box)]

    def _shard(self, box: Box, tensor: Tensor) -> WeightShard:
        if tensor.ndim == 2 and volume(box) % 2:
            wide = torch.zeros(tensor.shape[0], tensor.shape[1] + 3, dtype=tensor.dtype)
            wide[:, 1:-2] = tensor
            tensor = wide[:, 1:-2]
        return WeightShard(self.name, tensor, TensorLayout(tuple(self.values.shape), box))


def random_weights(
    seed: int, *, sources: range, destinations: range, num_ranks: int, dtype: torch.dtype | None = None
) -> list[Weight]:
    """A dozen weights that each lie on some of the sources, and are wanted by some of the destinations."""
    rng = random.Random(seed)
    weights = []
    for number in range(12):
        shape = tuple(rng.randint(1, 40) for _ in range(rng.choice([1, 2, 2, 2, 3])))
        kind = dtype or rng.choice([torch.float32, torch.bfloat16])
        weights.append(
            Weight(
                f"layers.{number}.weight",
                torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + number)).to(kind),
                _replicated(rng, shape, sources, num_ranks),
                _replicated(rng, shape, destinations, num_ranks),
                dtype or rng.choice([kind, kind, torch.bfloat16]),
            )
        )
    return weights


def by_name(shards: Iterable[WeightShard]) -> dict[str, WeightShard]:
    """Shards by a key of their own, since a rank may hold a weight in several."""
    return {f"{number} {shard.name}": shard for number, shard in enumerate(shards)}


def holdings_of(shards: Iterable[WeightShard]) -> tuple[Holding, ...]:
    """The holdings of some shards."""
    return tuple(
        Holding(shard.name, shard.layout.shape, shard.layout.box, shard.tensor.element_size()) for shard in shards
    )


def _replicated(rng: random.Random, shape: tuple[int, ...], ranks: range, num_ranks: int) -> RankBoxes:
    """A weight divided over some of the ranks, and again over others if there are enough left."""
    order = rng.sample(ranks, len(ranks))
    size = rng.randint(1, len(ranks))
    boxes: RankBoxes = [[] for _ in range(num_ranks)]
    for start in range(0, len(ranks) - size + 1, size):
        for rank, own in zip(order[start : start + size], _divided(rng, shape, size), strict=True):
            boxes[rank] = own
    return boxes


def _divided(rng: random.Random, shape: tuple[int, ...], parts: int) -> RankBoxes:
    """Uneven parts along a random dimension, empty ones among them; some of a rank's parts are two pieces."""
    dim = rng.randrange(len(shape))
    edges = [0, *sorted(rng.randint(0, shape[dim]) for _ in range(parts - 1)), shape[dim]]
    divided: RankBoxes = []
    for low, high in pairwise(edges):
        middle = rng.randint(low, high) if rng.random() < 0.3 else high
        intervals = [(low, middle), (middle, high)]
        divided.append([_box(shape, dim, interval) for interval in intervals if interval[0] < interval[1]])
    return divided


def _box(shape: tuple[int, ...], dim: int, interval: tuple[int, int]) -> Box:
    return tuple(interval if number == dim else (0, size) for number, size in enumerate(shape))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
