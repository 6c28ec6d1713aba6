"""Where a rank's piece of a weight lies inside the whole weight. Imports without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""One half-open interval of indices a dimension: ((0, 896), (0, 3584)) is the first 896 rows."""


@dataclass(frozen=True)
class TensorLayout:
    """The global shape of a weight, and the box of global indices that a piece holds."""

    shape: tuple[int, ...]
    box: Box

    def __post_init__(self) -> None:
        inside = all(0 <= low <= high <= size for (low, high), size in zip(self.box, self.shape, strict=True))
        assert inside, f"the box {self.box} is not inside a tensor of shape {self.shape}"

    @staticmethod
    def full(shape: Sequence[int]) -> "TensorLayout":
        """The layout of a piece that is the whole weight."""
        return TensorLayout(tuple(shape), tuple((0, size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return tuple(high - low for low, high in self.box)


@dataclass(frozen=True)
class WeightShard:
    """A rank's piece of one weight: `tensor` is a view of what an engine holds, never a copy.

    `name` is the weight's name in a Hugging Face checkpoint (`model.layers.7.self_attn.q_proj.weight`), whatever the
    engine calls it; a weight tied to another appears once, under the other's name.
    """

    name: str
    tensor: "Tensor"
    layout: TensorLayout

    def __post_init__(self) -> None:
        found = tuple(self.tensor.shape)
        assert found == self.layout.local_shape, f"{self.name}: {found} is not the layout's {self.layout.local_shape}"

    @property
    def dtype(self) -> "torch.dtype":
        """The number format."""
        return self.tensor.dtype

    def part(self, box: Box) -> "Tensor":
        """The view of a box (of global indices) that lies inside the piece."""
        bounds = zip(box, self.layout.box, strict=True)
        return self.tensor[tuple(slice(low - start, high - start) for (low, high), (start, _) in bounds)]

    @staticmethod
    def full(name: str, tensor: "Tensor") -> "WeightShard":
        """The shard of a rank that holds the whole weight."""
        return WeightShard(name, tensor, TensorLayout.full(tensor.shape))
