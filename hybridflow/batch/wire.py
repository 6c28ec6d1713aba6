"""Batches as bytes: tensors travel as NumPy views outside the pickle, so that they are not copied.

A torch tensor is pickled in-band. Its bytes as a NumPy array are an out-of-band buffer of pickle protocol 5, which Ray
puts into shared memory and maps in the receiving process. Receivers must not write to it in place.
"""

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.columns import Column, by_kind
from hybridflow.batch.ragged import Ragged

Payload = tuple[np.ndarray, str, tuple[int, ...]]
Meta = dict[str, float | int | str | bool | tuple[int, ...]]


def pack(
    columns: Mapping[str, Column], meta: Meta
) -> tuple[dict[str, Payload], dict[str, tuple[Payload, Payload]], dict[str, list], Meta]:
    """A batch's row, token and object columns and its metadata, every tensor as (bytes, dtype, shape).

    Shared offsets are pickled once.
    """
    rows, tokens, objects = by_kind(columns)
    offsets: dict[tuple[int, int], Payload] = {}
    packed = {}
    for name, column in tokens.items():
        key = column.offsets.data_ptr(), len(column.offsets)
        if key not in offsets:
            offsets[key] = as_bytes(column.offsets)
        packed[name] = (as_bytes(column.values), offsets[key])
    return {name: as_bytes(column) for name, column in rows.items()}, packed, objects, dict(meta)


def unpack(
    rows: Mapping[str, Payload], tokens: Mapping[str, tuple[Payload, Payload]], objects: dict[str, list], meta: Meta
) -> tuple[dict[str, Column], Meta]:
    """The columns and the metadata that `pack` packed; tensors share the received memory."""
    offsets: dict[int, Tensor] = {}
    ragged = {}
    for name, (values, ends) in tokens.items():
        if id(ends[0]) not in offsets:
            offsets[id(ends[0])] = from_bytes(ends)
        ragged[name] = Ragged(from_bytes(values), offsets[id(ends[0])])
    return {**{name: from_bytes(column) for name, column in rows.items()}, **ragged, **objects}, meta


def as_bytes(tensor: Tensor) -> Payload:
    """A tensor as a flat uint8 array (no copy when contiguous on the CPU), its dtype's name and its shape."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.as_strided((len(flat),), (1,))  # with at most one element, it may have had any stride
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def from_bytes(payload: Payload) -> Tensor:
    """The tensor that `as_bytes` converted; it shares the memory of the array."""
    array, dtype, shape = payload
    if 0 in shape:  # an empty array cannot be viewed as another type
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(array).view(getattr(torch, dtype)).reshape(shape)


def _ignore_that_arrays_are_not_writable() -> None:
    """Torch warns of it once per process, which is here: catching warnings takes longer than reading a small column."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(bytes(1), dtype=np.uint8))


_ignore_that_arrays_are_not_writable()
