"""Saves a training engine's state in files that any engine in any layout can load.

    actor/huggingface/   the weights, as `models/shard_files` writes them; or
    actor/adapter/       a low-rank adapter alone, as `models/adapters` writes it
    actor/optimizer/     moments, and float32 copies of weights in lower precision, in safetensors files, as
                         `<kind>.<canonical name of the weight>`; and numbers.json

A rank writes and reads the boxes that it holds; boxes that several ranks hold are written once. Neither safetensors nor
JSON can contain code, so a checkpoint from an untrusted source is safe to load.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hybridflow.errors import CheckpointError, EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, read_adapter
from hybridflow.models.shard_files import read_into, save_directory
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.models.shard_files.writing import DtypeOf
from hybridflow.parallel.collectives import Together, gathered
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

MODEL_DIRECTORY = "huggingface"
STATE_DIRECTORY = "optimizer"
NUMBERS_FILE = "numbers.json"
FIRST_MOMENT, SECOND_MOMENT, MASTER = "exp_avg", "exp_avg_sq", "master"

StateShard = tuple[str, WeightShard]
"""The kind of a piece of state (a moment, or the float32 copy), and the piece under the name of its weight."""

Shape = tuple[int, ...]

_PICKLED_METADATA = ".metadata"
"""Of the distributed checkpoints of torch that earlier versions wrote."""

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

    def write_numbers(target: Path) -> None:
        (target / NUMBERS_FILE).write_text(json.dumps(dict(numbers)))

    save_directory(_keyed(shards), directory / STATE_DIRECTORY, ranks, write_rest=write_numbers)


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
            read_into(target, _keyed(present))
    return numbers


def _keyed(shards: Iterable[StateShard]) -> list[WeightShard]:
    """The pieces under the names that their tensors have in the files."""
    return [WeightShard(_key(kind, shard), shard.tensor, shard.layout) for kind, shard in shards]


def _key(kind: str, shard: WeightShard) -> str:
    return f"{kind}.{shard.name}"


def _check_same_model(directory: Path, saved: Mapping[str, Shape], held: Mapping[str, Shape]) -> None:
    for name in sorted(saved.keys() | held.keys()):
        there, here = saved.get(name, "absent"), held.get(name, "absent")
        if there != here:
            raise EngineError(
                f"The checkpoint {directory} is of another model: '{name}' is {there} there and {here} here.",
                remedy=_SAME_MODEL,
            )


def _check_shape(directory: Path, kind: str, shard: WeightShard, saved: Shape) -> None:
    if saved != shard.layout.shape:
        raise EngineError(
            f"The checkpoint {directory} is of another model: {kind} of '{shard.name}' is {saved} there"
            f" and {shard.layout.shape} here.",
            remedy=_SAME_MODEL,
        )


def _numbers(target: Path) -> dict[str, int | float]:
    try:
        numbers = json.loads((target / NUMBERS_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(target, error) from error
    if not isinstance(numbers, dict) or not all(isinstance(number, int | float) for number in numbers.values()):
        raise _unreadable(target, f"{NUMBERS_FILE} must name numbers")
    return numbers


def _saved_tensors(target: Path) -> dict[str, Shape]:
    if (target / _PICKLED_METADATA).exists():
        raise _unreadable(target, f"{_PICKLED_METADATA} is torch's format, which can hold code, and is not opened")
    with _in_our_words(target):
        return saved_shapes(target)


def _unreadable(target: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"The optimizer's state in {target} cannot be read: {why}.",
        remedy="Use another checkpoint of the run, or give its model as model.path of a new one.",
    )


@contextmanager
def _of_a_checkpoint() -> Iterator[None]:
    """Reports an error in a model directory as one in a checkpoint, with a remedy for a checkpoint."""
    try:
        yield
    except EngineError as error:
        raise CheckpointError(
            error.message,
            remedy="Check that this node sees the checkpoint's files; if they are gone, use another checkpoint of the"
            " run (trainer.resume=PATH).",
        ) from error


@contextmanager
def _in_our_words(target: Path) -> Iterator[None]:
    """Reports an error in a directory of weights as one in the optimizer's state."""
    try:
        yield
    except EngineError as error:
        raise _unreadable(target, error.message.rstrip(".")) from error
