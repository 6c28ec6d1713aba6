"""Parameters as one run of elements each, for kernels that take no other memory."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def contiguous(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Replaces the memory of each tensor that is not contiguous by a copy, and writes the values back on exit.

    Columns of a wider tensor are not contiguous, as parameters bound to a rollout engine can be. torch's fused AdamW
    ignores strides and would write past them. Nothing is written back if the block raises.
    """
    places = {tensor: tensor.data for tensor in tensors if not tensor.is_contiguous()}
    for tensor, place in places.items():
        tensor.data = place.contiguous()
    try:
        yield
        with torch.no_grad():
            for tensor, place in places.items():
                place.copy_(tensor.data)
    finally:
        for tensor, place in places.items():
            tensor.data = place
