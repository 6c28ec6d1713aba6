"""Writes a Hugging Face directory with all ranks, each its own bytes."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.shard_files.reading import INDEX_FILE
from hybridflow.parallel.boxes import Box, uncovered, volume
from hybridflow.parallel.collectives import Plain, Together, gather_json, scatter_json
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import TensorLayout, WeightShard

DtypeOf = Callable[[str], torch.dtype]

LARGEST_FILE_BYTES = 5_000_000_000
"""The file size at which transformers splits large models."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Sizes of dtypes, by their safetensors names."""

_ALIGNMENT = 8
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


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


@dataclass(frozen=True)
class _Piece:
    """A rank's description of a shard, for the other ranks."""

    name: str
    dtype: str
    layout: TensorLayout

    @property
    def as_plain(self) -> Plain:
        """The form in which it is sent."""
        return self.name, self.dtype, self.layout.shape, self.layout.box

    @staticmethod
    def read(name: str, dtype: str, shape: list[int], box: list[list[int]]) -> "_Piece":
        """The piece that was sent."""
        return _Piece(name, dtype, TensorLayout(tuple(shape), tuple((low, high) for low, high in box)))


class _Task(NamedTuple):
    """A shard that a rank must write, by its number; its weight begins at `offset` of `file`."""

    shard: int
    file: str
    offset: int
    dtype: str


@dataclass(frozen=True)
class PlannedDirectory:
    """This rank's part of a directory that all ranks have planned together. Writing it needs no other rank."""

    directory: Path
    shards: Mapping[int, WeightShard]
    """The shards that this rank writes, by their number."""

    tasks: Sequence[_Task]
    files: Sequence[WeightFile]
    """The files whose headers this rank writes: all on rank 0, none on others."""

    write_rest: Callable[[Path], None] | None

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors of this part."""
        return sum(shard.tensor.nbytes for shard in self.shards.values())

    def copied(self) -> "PlannedDirectory":
        """The same part with copies of the tensors in host memory, so that the originals may change."""
        copies = {
            number: replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))
            for number, shard in self.shards.items()
        }
        return replace(self, shards=copies)

    def write(self) -> None:
        """Writes the part, in any thread, and flushes it to disk."""
        for file in self.files:
            _begin(self.directory / file.name, file)
        if len(self.files) > 1:
            (self.directory / INDEX_FILE).write_text(index_of(self.files))
        if self.write_rest is not None:
            self.write_rest(self.directory)
        for file in sorted({task.file for task in self.tasks}):
            with _opened(self.directory / file) as descriptor:
                for task in self.tasks:
                    if task.file == file:
                        _write_shard(descriptor, self.shards[task.shard], task)


def save_directory(
    shards: Iterable[WeightShard],
    directory: Path,
    ranks: Ranks,
    *,
    write_rest: Callable[[Path], None],
    dtype_of: DtypeOf | None = None,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> None:
    """Writes the weights of all ranks, each of which holds and writes only its own shards; see `plan_directory`."""
    planned = plan_directory(
        shards, directory, ranks, write_rest=write_rest, dtype_of=dtype_of, largest_file_bytes=largest_file_bytes
    )
    with Together(ranks):
        planned.write()


def plan_directory(
    shards: Iterable[WeightShard],
    directory: Path,
    ranks: Ranks,
    *,
    write_rest: Callable[[Path], None],
    dtype_of: DtypeOf | None = None,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
    stem: str = "model",
) -> PlannedDirectory:
    """Creates a directory for the weights of all ranks, and plans which rank writes which of them.

    Called on all ranks together, with a directory that all of them can access; with several nodes, on a shared file
    system. A box that several ranks hold is written by one of them. `write_rest` writes the configuration and the
    tokenizer, on rank 0. `dtype_of` maps the name of a weight to the dtype to save; by default, its own. `stem` is the
    files' name without the suffix.
    """
    own = list(shards)
    pieces = [
        _Piece(shard.name, _DTYPES[dtype_of(shard.name) if dtype_of else shard.tensor.dtype], shard.layout)
        for shard in own
    ]
    gathered_pieces = gather_json([piece.as_plain for piece in pieces], ranks)
    everyones = [[_Piece.read(*plain) for plain in rank_pieces] for rank_pieces in gathered_pieces]
    files: list[WeightFile] = []
    tasks: list[list[_Task]] = []
    with Together(ranks):
        if ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            for old in (*directory.glob("*.safetensors"), directory / INDEX_FILE):
                old.unlink(missing_ok=True)
            weights = {piece.name: SavedWeight(piece.dtype, piece.layout.shape) for some in everyones for piece in some}
            files = plan_files(weights, largest_bytes=largest_file_bytes, stem=stem)
            tasks = _tasks(everyones, weights, files)
    mine = [_Task(*task) for task in scatter_json(tasks, ranks)]
    written = {task.shard: own[task.shard] for task in mine}
    return PlannedDirectory(directory, written, mine, files, write_rest if ranks.rank == 0 else None)


def plan_files(
    weights: Mapping[str, SavedWeight], *, largest_bytes: int = LARGEST_FILE_BYTES, stem: str = "model"
) -> list[WeightFile]:
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
        return [_planned(f"{stem}.safetensors", weights, groups[0])]
    return [
        _planned(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", weights, names)
        for number, names in enumerate(groups, start=1)
    ]


def index_of(files: Sequence[WeightFile]) -> str:
    """The text of the index, which maps each weight to its file."""
    total = sum(file.num_bytes - len(file.header) for file in files)
    places = {name: file.name for file in files for name in file.offsets}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def byte_runs(layout: TensorLayout, item_bytes: int) -> Iterator[tuple[int, int]]:
    """The runs of bytes of a box in its weight: (first byte, number of bytes), in row-major order."""
    yield from _runs(layout.shape, layout.box, item_bytes, start=0)


def _tasks(
    everyones: list[list[_Piece]], weights: Mapping[str, SavedWeight], files: Iterable[WeightFile]
) -> list[list[_Task]]:
    """The tasks of each rank."""
    place = {name: (file.name, offset) for file in files for name, offset in file.offsets.items()}
    tasks: list[list[_Task]] = [[] for _ in everyones]
    for name, rank, shard in _writers(everyones, weights):
        tasks[rank].append(_Task(shard, *place[name], weights[name].dtype))
    return tasks


def _begin(path: Path, file: WeightFile) -> None:
    """Writes the header and sets the size of a file, in which other ranks may already have written."""
    with _opened(path) as descriptor:
        _write_all(descriptor, memoryview(file.header), 0)
        os.truncate(descriptor, file.num_bytes)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file for writing at any place, created if it does not exist, and flushed to disk at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _writers(everyones: list[list[_Piece]], weights: Mapping[str, SavedWeight]) -> list[tuple[str, int, int]]:
    """(weight, rank, number of its shard) for each box, written by its holder with the least work so far."""
    holders: dict[str, dict[Box, list[tuple[int, int]]]] = {name: {} for name in weights}
    for rank, pieces in enumerate(everyones):
        for number, piece in enumerate(pieces):
            if volume(piece.layout.box):
                holders[piece.name].setdefault(piece.layout.box, []).append((rank, number))
    load = [0] * len(everyones)
    writers = []
    for name, boxes in holders.items():
        whole = TensorLayout.full(weights[name].shape).box
        assert not uncovered(whole, sorted(boxes)), f"the ranks hold only the boxes {sorted(boxes)} of '{name}' {whole}"
        for box, candidates in boxes.items():
            rank, number = min(candidates, key=lambda holder: (load[holder[0]], holder))
            load[rank] += volume(box) * ITEM_BYTES[weights[name].dtype]
            writers.append((name, rank, number))
    return writers


def _write_shard(descriptor: int, shard: WeightShard, task: _Task) -> None:
    data = _bytes_of(shard.tensor, _TORCH_DTYPES[task.dtype])
    position = 0
    for start, count in byte_runs(shard.layout, ITEM_BYTES[task.dtype]):
        _write_all(descriptor, data[position : position + count], task.offset + start)
        position += count


def _bytes_of(tensor: Tensor, dtype: torch.dtype) -> memoryview:
    own = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
    return own.view(-1).view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


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
