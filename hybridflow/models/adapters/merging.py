"""Merges an adapter into a model's weights on access, weight by weight."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hybridflow.models.adapters.lora import DOWN, UP, Adapter, is_adapter_weight
from hybridflow.parallel.boxes import Box
from hybridflow.parallel.layout import WeightShard

TILE_ROWS, TILE_COLUMNS = 512, 4096
"""The tiles in which a merged weight is computed, counted from the start of the rank's shard."""


class MergedShard(WeightShard):
    """A rank's shard of W + scale * B A, which is not stored: every access computes it again.

    `part` computes only the tiles that it needs. A tile has the same bits in every part, so a weight's checksum does
    not depend on the parts in which it was sent. Sums are in float32, and rounded once.
    """

    _parts: tuple[Tensor, Tensor, Tensor, float]
    """W, B, A and the scale."""

    def __init__(self, base: WeightShard, up: Tensor, down: Tensor, scale: float) -> None:
        rows, columns = base.layout.local_shape
        assert up.shape[0] == rows and down.shape[1] == columns, f"{base.name}: {up.shape} and {down.shape} for {rows}"
        object.__setattr__(self, "name", base.name)
        object.__setattr__(self, "layout", base.layout)
        object.__setattr__(self, "_parts", (base.tensor, up, down, scale))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of W."""
        return self._parts[0].dtype

    @property
    def tensor(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shard, as a new tensor."""
        return self.part(self.layout.box)

    @torch.no_grad()
    def part(self, box: Box) -> Tensor:
        """A box inside the shard, as a new tensor."""
        (first, last), (left, right) = (
            (low - start, high - start) for (low, high), (start, _) in zip(box, self.layout.box, strict=True)
        )
        merged = self._parts[0].new_empty(last - first, right - left)
        for top in range(first - first % TILE_ROWS, last, TILE_ROWS):
            for side in range(left - left % TILE_COLUMNS, right, TILE_COLUMNS):
                tile = self._tile(slice(top, top + TILE_ROWS), slice(side, side + TILE_COLUMNS))
                rows, columns = max(first, top), max(left, side)
                wanted = tile[rows - top : last - top, columns - side : right - side]
                merged[rows - first : rows - first + len(wanted), columns - left :][:, : wanted.shape[1]] = wanted
        return merged

    def _tile(self, rows: slice, columns: slice) -> Tensor:
        base, up, down, scale = self._parts
        product = up[rows].float() @ down[:, columns].float()
        return product.mul_(scale).add_(base[rows, columns]).to(base.dtype)


def merged_shards(
    shards: Iterable[WeightShard], adapter: Adapter, downs: Mapping[str, Tensor] | None = None
) -> Iterator[WeightShard]:
    """A rank's shards of the merged model, from its `shards` of a model with an adapter.

    Weights that are not adapted stay views. `downs` has the A of each adapted weight, by name, with all rows and this
    rank's columns; None if `shards` contain them in that form.
    """
    held = list(shards)
    own = {shard.name: shard.tensor for shard in held if is_adapter_weight(shard.name)}
    for shard in held:
        if shard.name in adapter.adapted:
            down = own[_addition(shard.name, DOWN)] if downs is None else downs[shard.name]
            yield MergedShard(shard, own[_addition(shard.name, UP)], down, adapter.scale)
        elif not is_adapter_weight(shard.name):
            yield shard


def _addition(weight: str, kind: str) -> str:
    return f"{weight.removesuffix('.weight')}.{kind}.weight"
