"""A canonical weight inside an engine's tensor."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.parallel.boxes import Box
from hybridflow.parallel.layout import TensorLayout, WeightShard

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """A shard of a canonical weight, and its place in an engine's tensor.

    `region` indexes the engine's tensor: `tensor[part.region]` has the layout's local shape. Elements that no part
    covers are padding.
    """

    name: str
    region: tuple[slice | int, ...]
    layout: TensorLayout


def views(tensor: "Tensor", parts: Iterable[Part]) -> list[WeightShard]:
    """The shards in an engine's tensor, as views of it."""
    return [WeightShard(part.name, tensor[part.region], part.layout) for part in parts]


def whole_part(name: str, layout: TensorLayout) -> Part:
    """A part that fills its tensor."""
    return Part(name, tuple(slice(0, size) for size in layout.local_shape), layout)


def stacked_parts(pieces: Iterable[tuple[str, tuple[int, ...], Box]], *within: int) -> list[Part]:
    """The parts of shards (name, global shape, box) that are stacked by rows in `tensor[within]`."""
    parts, start = [], 0
    for name, shape, box in pieces:
        layout = TensorLayout(shape, box)
        stop = start + layout.local_shape[0]
        parts.append(Part(name, (*within, slice(start, stop)), layout))
        start = stop
    return parts
