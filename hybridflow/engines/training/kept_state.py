"""A copy of a training engine's state in host memory, from which the same rank of the same layout is restored."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64


@torch.no_grad()
def packed(tensors: Iterable[Tensor]) -> Tensor:
    """The bytes of tensors, one after another, in host memory [bytes]."""
    given = list(tensors)
    kept = torch.empty(_size(given), dtype=torch.uint8)
    for piece, tensor in _pieces(kept, given):
        piece.copy_(tensor)
    return kept


@torch.no_grad()
def unpack(kept: Tensor, tensors: Iterable[Tensor]) -> None:
    """Copies the bytes that `packed` returned into tensors of the same shapes and dtypes."""
    given = list(tensors)
    assert len(kept) == _size(given), f"{len(kept)} bytes for tensors of {_size(given)}"
    for piece, tensor in _pieces(kept, given):
        tensor.copy_(piece)


def _pieces(kept: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The part of `kept` for each tensor, in its shape and dtype; and the tensor."""
    start = 0
    for tensor in tensors:
        yield kept[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape), tensor
        start += _size([tensor])


def _size(tensors: Sequence[Tensor]) -> int:
    """The bytes that these tensors take, each of which begins at a multiple of the alignment."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
