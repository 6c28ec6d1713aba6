"""The layout of .safetensors files, computed from names, dtypes and shapes."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hybridflow.parallel.boxes import Box
from hybridflow.parallel.layout import TensorLayout

LARGEST_FILE_BYTES = 5_000_000_000
"""The file size at which transformers splits large models."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Sizes of dtypes, by their safetensors names."""

_ALIGNMENT = 8


@dataclass(frozen=True)
class SavedWeight:
    """A weight in a file: its dtype (a safetensors name) and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole weight."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightFile:
    """A planned .safetensors file: its header, the offset of each weight, and its size."""

    name: str
    header: bytes
    offsets: dict[str, int]
    num_bytes: int


def plan_files(weights: Mapping[str, SavedWeight], *, largest_bytes: int = LARGEST_FILE_BYTES) -> list[WeightFile]:
    """The files for the given weights, each of at most `largest_bytes`, unless a single weight is larger."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in _in_order(weights):
        more = weights[name].num_bytes
        if groups[-1] and size + more > largest_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += more
    if len(groups) == 1:
        return [_planned("model.safetensors", weights, groups[0])]
    return [
        _planned(f"model-{number:05d}-of-{len(groups):05d}.safetensors", weights, names)
        for number, names in enumerate(groups, start=1)
    ]


def index_of(files: list[WeightFile]) -> str:
    """The text of the index, which maps each weight to its file."""
    total = sum(file.num_bytes - len(file.header) for file in files)
    places = {name: file.name for file in files for name in file.offsets}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def byte_runs(layout: TensorLayout, item_bytes: int) -> Iterator[tuple[int, int]]:
    """The runs of bytes of a box in its weight: (first byte, number of bytes), in row-major order."""
    yield from _runs(layout.shape, layout.box, item_bytes, start=0)


def _runs(shape: tuple[int, ...], box: Box, item_bytes: int, start: int) -> Iterator[tuple[int, int]]:
    if not shape:
        yield start, item_bytes
        return
    (low, high), inner = box[0], math.prod(shape[1:]) * item_bytes
    if all(bounds == (0, size) for bounds, size in zip(box[1:], shape[1:], strict=True)):
        if high > low:
            yield start + low * inner, (high - low) * inner
        return
    for index in range(low, high):
        yield from _runs(shape[1:], box[1:], item_bytes, start + index * inner)


def _in_order(weights: Mapping[str, SavedWeight]) -> list[str]:
    """The order of safetensors: by dtype, the widest first, so that every weight is aligned; then by name."""
    return sorted(weights, key=lambda name: (-ITEM_BYTES[weights[name].dtype], name))


def _planned(file_name: str, weights: Mapping[str, SavedWeight], names: list[str]) -> WeightFile:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, position = {}, 0
    for name in names:
        weight = weights[name]
        starts[name] = position
        position += weight.num_bytes
        span = [starts[name], position]
        entries[name] = {"dtype": weight.dtype, "shape": list(weight.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + start for name, start in starts.items()}
    return WeightFile(file_name, header, offsets, len(header) + position)
