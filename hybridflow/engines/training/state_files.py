"""A training engine's state in files that any engine in any layout reads back.

    actor/huggingface/   the weights, as `models/shard_files` writes them; or
    actor/adapter/       a low-rank adapter alone, as `models/adapters` writes it
    actor/optimizer/     moments, and float32 copies of weights held in fewer bits, in a distributed checkpoint of
                         torch's, as `<kind>.<canonical name of the weight>`; and numbers.json

A rank writes and reads the boxes that it holds; boxes that several ranks hold are written once.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hybridflow.errors import CheckpointError, EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, read_adapter
from hybridflow.models.shard_files import read_into, save_directory
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.shard_files.writing import DtypeOf
from hybridflow.parallel.boxes import volume
from hybridflow.parallel.collectives import Together, gathered
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

MODEL_DIRECTORY = "huggingface"
STATE_DIRECTORY = "optimizer"
NUMBERS_FILE = "numbers.json"
FIRST_MOMENT, SECOND_MOMENT, MASTER = "exp_avg", "exp_avg_sq", "master"

StateShard = tuple[str, WeightShard]
"""What a piece of state is (a moment, or the float32 copy), and the piece, under the name of its weight."""

Shape = tuple[int, ...]

_SAME_MODEL = "Resume with the model the run was started with (model.path, critic.model.path)."


def save_weights(
    directory: Path,
    shards: Iterable[WeightShard],
    ranks: Ranks,
    *,
    write_rest: Callable[[Path], None],
    dtype_of: DtypeOf | None = None,
) -> None:
    """Writes the model that all ranks hold together to `directory/huggingface`; see `save_directory`."""
    save_directory(shards, directory / MODEL_DIRECTORY, ranks, write_rest=write_rest, dtype_of=dtype_of)


def load_weights(directory: Path, shards: Iterable[WeightShard], ranks: Ranks) -> None:
    """Fills the shards with what `save_weights` wrote; raises where that is another model, and changes nothing."""
    own = list(shards)
    shapes = gathered({shard.name: shard.layout.shape for shard in own}, ranks)
    with Together(ranks):
        if ranks.rank == 0:
            held = {name: tuple(shape) for some in shapes for name, shape in some.items()}
            with _of_a_checkpoint():
                saved = saved_shapes(directory / MODEL_DIRECTORY)
            _check_same_model(directory, saved, held)
    with Together(ranks), _of_a_checkpoint():
        read_into(directory / MODEL_DIRECTORY, own)


def save_state(directory: Path, shards: Iterable[StateShard], numbers: Mapping[str, int | float], ranks: Ranks) -> None:
    """Writes the optimizer's state that all ranks hold together, and numbers that are the same on all of them."""
    target = directory / STATE_DIRECTORY
    with Together(ranks):
        if ranks.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            (target / NUMBERS_FILE).write_text(json.dumps(dict(numbers)))
    with _in_our_words(target):
        save({}, checkpoint_id=target, planner=_SavePlanner(shards), no_dist=ranks.mesh.size == 1)


def load_state(
    directory: Path, shards: Iterable[StateShard], ranks: Ranks, *, own_copies: Iterable[WeightShard] = ()
) -> dict[str, int | float]:
    """Fills the shards, which are writable views of an optimizer's state, and returns the numbers.

    Before the first optimizer step there are no moments: they become zero. A float32 copy that was not saved is read
    from the saved weights (an adapter's, where that is what was trained). `own_copies` are the weights that have no
    copy, being in float32: where they had one when they were saved, rounded, they take its values.
    """
    target = directory / STATE_DIRECTORY
    wanted = list(shards)
    with Together(ranks):
        numbers = _numbers(target)
        saved = _saved_tensors(target)
        absent = [shard for shard in wanted if _key(*shard) not in saved]
        copies = [shard for kind, shard in absent if kind == MASTER]
        if (directory / ADAPTER_DIRECTORY).is_dir():
            read_adapter(directory / ADAPTER_DIRECTORY, copies)
        else:
            read_into(directory / MODEL_DIRECTORY, copies)
        for kind, shard in absent:
            if kind != MASTER:
                shard.tensor.zero_()
        wanted += [(MASTER, weight) for weight in own_copies]
        present = [shard for shard in wanted if _key(*shard) in saved]
        for kind, shard in present:
            _check_shape(directory, kind, shard, saved[_key(kind, shard)])
    with _in_our_words(target):
        load({}, checkpoint_id=target, planner=_LoadPlanner(present), no_dist=ranks.mesh.size == 1)
    return numbers


class _SavePlanner(DefaultSavePlanner):
    """Writes the boxes of shards, whatever they are views of."""

    def __init__(self, shards: Iterable[StateShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = _by_place(shards)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(shard),
                    properties=TensorProperties.create_from_tensor(shard.tensor),
                    size=torch.Size(shard.layout.shape),
                ),
            )
            for index, shard in self._shards.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._shards[index].tensor.detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Reads the boxes of shards out of whatever boxes were saved."""

    def __init__(self, shards: Iterable[StateShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._shards = _by_place(shards)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        wanted: dict[str, list[ChunkStorageMetadata]] = {}
        for index, shard in self._shards.items():
            wanted.setdefault(index.fqn, []).append(_chunk(shard))
        saved = self.metadata.state_dict_metadata
        items = []
        for key, chunks in wanted.items():
            tensor = saved[key]
            assert isinstance(tensor, TensorStorageMetadata), key
            items += create_read_items_for_chunk_list(key, tensor, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._shards[index].tensor


def _by_place(shards: Iterable[StateShard]) -> dict[MetadataIndex, WeightShard]:
    """The shards that hold something, by key and first index: that is how a checkpoint tells boxes apart."""
    found: dict[MetadataIndex, WeightShard] = {}
    for kind, shard in shards:
        if not volume(shard.layout.box):
            continue
        index = MetadataIndex(_key(kind, shard), [low for low, _ in shard.layout.box])
        assert index not in found, f"a rank holds {index.fqn} twice at {index.offset}"
        found[index] = shard
    return found


def _key(kind: str, shard: WeightShard) -> str:
    return f"{kind}.{shard.name}"


def _chunk(shard: WeightShard) -> ChunkStorageMetadata:
    offsets = torch.Size([low for low, _ in shard.layout.box])
    return ChunkStorageMetadata(offsets, torch.Size(shard.layout.local_shape))


def _check_same_model(directory: Path, saved: Mapping[str, Shape], held: Mapping[str, Shape]) -> None:
    for name in sorted(saved.keys() | held.keys()):
        there, here = saved.get(name, "absent"), held.get(name, "absent")
        if there != here:
            raise EngineError(
                f"The checkpoint {directory} is of another model: '{name}' is {there} there and {here} here.",
                remedy=_SAME_MODEL,
            )


def _check_shape(directory: Path, kind: str, shard: WeightShard, saved: object) -> None:
    assert isinstance(saved, TensorStorageMetadata), kind
    if tuple(saved.size) != shard.layout.shape:
        raise EngineError(
            f"The checkpoint {directory} is of another model: {kind} of '{shard.name}' is {tuple(saved.size)} there"
            f" and {shard.layout.shape} here.",
            remedy=_SAME_MODEL,
        )


def _numbers(target: Path) -> dict[str, int | float]:
    try:
        return json.loads((target / NUMBERS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(target, error) from error


def _saved_tensors(target: Path) -> dict[str, STORAGE_TYPES]:
    try:
        return FileSystemReader(target).read_metadata().state_dict_metadata
    except (OSError, EOFError, UnpicklingError) as error:
        raise _unreadable(target, error) from error


def _unreadable(target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"The optimizer's state in {target} cannot be read: {error}.",
        remedy="Use another checkpoint of the run, or give its model as model.path of a new one.",
    )


@contextmanager
def _of_a_checkpoint() -> Iterator[None]:
    """What is wrong with a model directory, said of a checkpoint: no setting of a model would mend it."""
    try:
        yield
    except EngineError as error:
        raise CheckpointError(
            error.message,
            remedy="See whether this node sees the checkpoint's files; if they are gone, use another checkpoint of the"
            " run (trainer.resume=PATH).",
        ) from error


@contextmanager
def _in_our_words(target: Path) -> Iterator[None]:
    """torch's failure, which is not an Exception, as an error of ours with the first rank's cause."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(
            f"The optimizer's state in {target} could not be written or read:"
            f" rank {rank}: {type(cause).__name__}: {cause}.",
            remedy="Use another checkpoint of the run, or a directory that can be written.",
        ) from cause
