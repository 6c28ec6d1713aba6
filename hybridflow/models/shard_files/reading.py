"""Reads boxes of weights from a Hugging Face directory, and only those parts of its files."""

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridflow.config.json_text import read_json_object
from hybridflow.errors import EngineError
from hybridflow.models.loading import check_finite
from hybridflow.parallel.layout import WeightShard

INDEX_FILE = "model.safetensors.index.json"
_GIVE_ANOTHER = "Give a complete Hugging Face directory with .safetensors files as model.path."


def weight_files(directory: Path) -> dict[str, Path]:
    """The file of each weight in a directory, from the index if there is one."""
    index = directory / INDEX_FILE
    try:
        if index.is_file():
            return {name: directory / file for name, file in _weight_map(read_json_object(index)).items()}
        found, paths = {}, sorted(directory.glob("*.safetensors"))
        for path in paths:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise EngineError(f"The weights in {directory} cannot be read: {error}", remedy=_GIVE_ANOTHER) from error
    if not paths:
        raise EngineError(f"There are no .safetensors files in {directory}.", remedy=_GIVE_ANOTHER)
    return found


def saved_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in a directory."""
    files, shapes = weight_files(directory), {}
    for path in sorted(set(files.values())):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise EngineError(f"The weights in {path} cannot be read: {error}", remedy=_GIVE_ANOTHER) from error
    return {name: shapes[name] for name in files}


@torch.no_grad()
def read_into(directory: Path, shards: Iterable[WeightShard], *, zero_if_absent: Collection[str] = ()) -> None:
    """Reads the shards' boxes from a directory, and converts their dtype if it differs.

    Weights in `zero_if_absent` become zero if the directory lacks them, or has them in another shape, such as a value
    head in the directory of a language model. Names in the directory may lack the prefix `model.`, as in a decoder that
    was saved without its head.
    """
    shards = list(shards)
    files = weight_files(directory) if shards else {}
    wanted: dict[Path, list[tuple[str, WeightShard]]] = {}
    for shard in shards:
        saved = next((name for name in (shard.name, shard.name.removeprefix("model.")) if name in files), None)
        if saved is not None:
            wanted.setdefault(files[saved], []).append((saved, shard))
        elif shard.name in zero_if_absent:
            shard.tensor.zero_()
        else:
            raise EngineError(f"The model in {directory} has no weight '{shard.name}'.", remedy=_GIVE_ANOTHER)
    for path, pieces in wanted.items():
        _read_file(path, pieces, zero_if_absent)


def _weight_map(index: dict[str, Any]) -> dict[str, str]:
    """The file of each weight in an index; raises `ValueError` if it is not valid."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{INDEX_FILE} has no mapping 'weight_map' to file names")
    if outside := next((file for file in found.values() if Path(file).name != file), None):
        raise ValueError(f"{INDEX_FILE} names '{outside[:80]}', which is not a file of the directory")
    return found


def _read_file(path: Path, pieces: list[tuple[str, WeightShard]], zero_if_absent: Collection[str]) -> None:
    with ExitStack() as stack:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
            for name, shard in pieces:
                saved = file.get_slice(name)
                shape = tuple(saved.get_shape())
                if shape == shard.layout.shape:
                    # safetensors refuses empty slices.
                    if shard.tensor.numel():
                        shard.tensor.copy_(saved[tuple(slice(low, high) for low, high in shard.layout.box)])
                        check_finite(name, shard.tensor, path)
                elif shard.name in zero_if_absent:
                    shard.tensor.zero_()
                else:
                    raise _other_shape(path, shard, shape)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"The weights in {path} cannot be read: {error}", remedy=_GIVE_ANOTHER) from error


def _other_shape(path: Path, shard: WeightShard, shape: tuple[int, ...]) -> EngineError:
    return EngineError(
        f"'{shard.name}' has shape {shape} in {path}, but {shard.layout.shape} in this run's model.",
        remedy="Its config.json does not match its weights; give files that belong together.",
    )
