"""Weight shards: the part of a weight that a rank holds. Imports without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.parallel.boxes import Box, slices_within

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class TensorLayout:
    """The global shape of a weight, and the box of its indices that a shard holds."""

    shape: tuple[int, ...]
    box: Box

    def __post_init__(self) -> None:
        inside = all(0 <= low <= high <= size for (low, high), size in zip(self.box, self.shape, strict=True))
        assert inside, f"the box {self.box} is not inside a tensor of shape {self.shape}"

    @staticmethod
    def full(shape: Sequence[int]) -> "TensorLayout":
        """The layout of a shard that is the whole weight."""
        return TensorLayout(tuple(shape), tuple((0, size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(high - low for low, high in self.box)


@dataclass(frozen=True)
class WeightShard:
    """The part of one weight that a rank holds: `tensor` is a view of the engine's memory, never a copy.

    `name` is the weight's name in a Hugging Face checkpoint (`model.layers.7.self_attn.q_proj.weight`), whatever the
    engine calls it. Tied weights appear once.
    """

    name: str
    tensor: "Tensor"
    layout: TensorLayout

    def __post_init__(self) -> None:
        found = tuple(self.tensor.shape)
        assert found == self.layout.local_shape, (
            f"{self.name}: the shape {found} is not the layout's {self.layout.local_shape}"
        )

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of the tensor."""
        return self.tensor.dtype

    def part(self, box: Box) -> "Tensor":
        """A view of a box of global indices, which must lie inside the shard."""
        return self.tensor[slices_within(box, self.layout.box)]

    @staticmethod
    def full(name: str, tensor: "Tensor") -> "WeightShard":
        """The shard of a rank that holds the whole weight."""
        return WeightShard(name, tensor, TensorLayout.full(tensor.shape))
