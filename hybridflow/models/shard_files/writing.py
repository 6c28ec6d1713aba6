"""Writes a Hugging Face directory with all ranks, each its own bytes."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hybridflow.models.shard_files.files import (
    ITEM_BYTES,
    LARGEST_FILE_BYTES,
    SavedWeight,
    WeightFile,
    byte_runs,
    index_of,
    plan_files,
)
from hybridflow.models.shard_files.reading import INDEX_FILE
from hybridflow.parallel.boxes import Box, uncovered, volume
from hybridflow.parallel.collectives import Plain, Together, gather_json, scatter_json
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import TensorLayout, WeightShard

DtypeOf = Callable[[str], torch.dtype]
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


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


def save_directory(
    shards: Iterable[WeightShard],
    directory: Path,
    ranks: Ranks,
    *,
    write_rest: Callable[[Path], None],
    dtype_of: DtypeOf | None = None,
    largest_file_bytes: int = LARGEST_FILE_BYTES,
) -> None:
    """Writes the weights of all ranks, each of which holds and writes only its own shards.

    Called on all ranks together, with a directory that all of them can access; with several nodes, on a shared file
    system. A box that several ranks hold is written by one of them. `write_rest` writes the configuration and the
    tokenizer, on rank 0. `dtype_of` maps the name of a weight to the dtype to save; by default, its own.
    """
    own = list(shards)
    pieces = [
        _Piece(shard.name, _DTYPES[dtype_of(shard.name) if dtype_of else shard.tensor.dtype], shard.layout)
        for shard in own
    ]
    gathered_pieces = gather_json([piece.as_plain for piece in pieces], ranks)
    everyones = [[_Piece.read(*plain) for plain in rank_pieces] for rank_pieces in gathered_pieces]
    tasks: list[list[_Task]] = []
    with Together(ranks):
        if ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            tasks = _begun(everyones, directory, largest_file_bytes)
            write_rest(directory)
    mine = [_Task(*task) for task in scatter_json(tasks, ranks)]
    with Together(ranks):
        _write(own, mine, directory)


def _begun(everyones: list[list[_Piece]], directory: Path, largest_file_bytes: int) -> list[list[_Task]]:
    """Creates the files with headers and full sizes, and returns the tasks of each rank."""
    weights = {piece.name: SavedWeight(piece.dtype, piece.layout.shape) for pieces in everyones for piece in pieces}
    files = plan_files(weights, largest_bytes=largest_file_bytes)
    for old in (*directory.glob("*.safetensors"), directory / INDEX_FILE):
        old.unlink(missing_ok=True)
    for file in files:
        _begin(directory / file.name, file)
    if len(files) > 1:
        (directory / INDEX_FILE).write_text(index_of(files))
    place = {name: (file.name, offset) for file in files for name, offset in file.offsets.items()}
    tasks: list[list[_Task]] = [[] for _ in everyones]
    for name, rank, shard in _writers(everyones, weights):
        tasks[rank].append(_Task(shard, *place[name], weights[name].dtype))
    return tasks


def _begin(path: Path, file: WeightFile) -> None:
    with path.open("wb") as stream:
        stream.write(file.header)
        stream.truncate(file.num_bytes)
        stream.flush()
        os.fsync(stream.fileno())


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


def _write(own: list[WeightShard], tasks: list[_Task], directory: Path) -> None:
    for file in sorted({task.file for task in tasks}):
        descriptor = os.open(directory / file, os.O_WRONLY)
        try:
            for task in tasks:
                if task.file == file:
                    _write_shard(descriptor, own[task.shard], task)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
