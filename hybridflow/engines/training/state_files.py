"""Saves a training engine's state in files that any engine in any layout can load.

    actor/huggingface/   the weights, as `models/shard_files` writes them; or
    actor/adapter/       a LoRA adapter alone, as `models/adapters` writes it
    actor/optimizer/     moments, and float32 copies of weights in lower precision, in safetensors files, as
                         `<kind>.<canonical name of the weight>`; and numbers.json

A rank writes and reads the boxes that it holds; boxes that several ranks hold are written once. Neither safetensors nor
JSON can contain code, so a checkpoint from an untrusted source is safe to load.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from hybridflow.errors import CheckpointError, EngineError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, read_adapter
from hybridflow.models.shard_files import PlannedDirectory, plan_directory, read_into
from hybridflow.models.shard_files.reading import saved_shapes
from hybridflow.parallel.collectives import Together, gather_json
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

MODEL_DIRECTORY = "huggingface"
STATE_DIRECTORY = "optimizer"
NUMBERS_FILE = "numbers.json"
FIRST_MOMENT, SECOND_MOMENT, MASTER = "exp_avg", "exp_avg_sq", "master"
STEPS = "steps"

StateShard = tuple[str, WeightShard]
"""The kind of a piece of state (a moment, or a float32 copy), and the piece, under the name of its weight."""

ShardsOf = Callable[[Tensor], Iterable[WeightShard]]
"""Maps a tensor of a parameter's shape (the parameter, or a moment of it) to views of it, as shards of its weights."""


@dataclass(frozen=True)
class SteppedTensor:
    """A tensor that AdamW steps for a parameter: the parameter, a float32 copy of it, or a range of either."""

    parameter: Tensor
    tensor: Tensor
    optimizer: Optimizer
    shards_of: ShardsOf
    """For tensors of the shape of `tensor`."""

    @property
    def is_copy(self) -> bool:
        """Whether the tensor is a float32 copy of a parameter in lower precision."""
        return self.parameter.dtype is not torch.float32

    @property
    def state(self) -> dict[str, Tensor]:
        """AdamW's state of the tensor; empty before the first step."""
        return self.optimizer.state[self.tensor]


Shape = tuple[int, ...]

SAME_MODEL = "Resume with the model the run was started with (model.path, critic.model.path)."


def plan_weights(
    directory: Path, shards: Iterable[WeightShard], ranks: Ranks, *, write_rest: Callable[[Path], None]
) -> PlannedDirectory:
    """Plans `directory/huggingface`, the model that all ranks hold together; see `plan_directory`."""
    return plan_directory(shards, directory / MODEL_DIRECTORY, ranks, write_rest=write_rest)


def load_weights(directory: Path, shards: Iterable[WeightShard], ranks: Ranks) -> None:
    """Reads what `plan_weights` planned into the shards; raises if it is another model, and changes nothing then."""
    own = list(shards)
    shapes = gather_json({shard.name: shard.layout.shape for shard in own}, ranks)
    with Together(ranks):
        if ranks.rank == 0:
            held = {name: tuple(shape) for some in shapes for name, shape in some.items()}
            with _checkpoint_errors():
                saved = saved_shapes(directory / MODEL_DIRECTORY)
            for name in sorted(saved.keys() | held.keys()):
                _check_shape(directory, f"'{name}'", saved.get(name), held.get(name))
    with Together(ranks), _checkpoint_errors():
        read_into(directory / MODEL_DIRECTORY, own)


@torch.no_grad()
def add_moments(stepped: Sequence[SteppedTensor]) -> None:
    """Adds moments of zero where there are none."""
    for each in stepped:
        for kind in (FIRST_MOMENT, SECOND_MOMENT):
            if kind not in each.state:
                each.state[kind] = torch.zeros_like(each.tensor)


@torch.no_grad()
def load_optimizer(
    directory: Path, stepped: Sequence[SteppedTensor], ranks: Ranks, *, own_copies: Iterable[WeightShard]
) -> int:
    """Reads the state saved by any engine in any layout; returns the steps taken. Weights must be loaded first."""
    add_moments(stepped)
    steps = load_state(directory, state_shards(stepped), ranks, own_copies=own_copies)
    set_steps(stepped, steps)
    return steps


def set_steps(stepped: Sequence[SteppedTensor], steps: int) -> None:
    """Sets the optimizer steps taken, in the state of every tensor."""
    for each in stepped:
        each.state["step"] = torch.tensor(float(steps), device=each.parameter.device)
    for optimizer in {each.optimizer for each in stepped}:
        for group in optimizer.param_groups:
            group["step"] = steps  # TransformerEngine's AdamW counts here from its first step; torch's ignores it


def plan_state(directory: Path, shards: Iterable[StateShard], steps: int, ranks: Ranks) -> PlannedDirectory:
    """Plans `directory/optimizer`: the state that all ranks hold together, and the optimizer steps taken."""

    def write_numbers(target: Path) -> None:
        (target / NUMBERS_FILE).write_text(json.dumps({STEPS: steps}))

    return plan_directory(_keyed(shards), directory / STATE_DIRECTORY, ranks, write_rest=write_numbers)


def load_state(
    directory: Path, shards: Iterable[StateShard], ranks: Ranks, *, own_copies: Iterable[WeightShard] = ()
) -> int:
    """Reads the state into the shards, which are writable views of an optimizer's state, and returns the steps taken.

    Moments that were not saved (before the first optimizer step) become zero. A float32 copy that was not saved is read
    from the saved weights (those of the adapter, if an adapter was trained). `own_copies` are float32 weights, which
    have no copy: if a float32 copy of them was saved, they take its values, which are not rounded.
    """
    target = directory / STATE_DIRECTORY
    wanted = list(shards)
    with Together(ranks):
        steps = _saved_steps(target)
        with _state_errors(target):
            saved = saved_shapes(target)
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
            _check_shape(directory, f"{kind} of '{shard.name}'", saved[_key(kind, shard)], shard.layout.shape)
        with _state_errors(target):
            read_into(target, _keyed(present))
    return steps


def state_shards(stepped: Iterable[SteppedTensor]) -> Iterator[StateShard]:
    """The optimizer's state as writable views: moments once there are any, and float32 copies."""
    for each in stepped:
        kept = {kind: each.state[kind] for kind in (FIRST_MOMENT, SECOND_MOMENT) if kind in each.state}
        for kind, tensor in (kept | ({MASTER: each.tensor.detach()} if each.is_copy else {})).items():
            yield from ((kind, shard) for shard in each.shards_of(tensor))


def _keyed(shards: Iterable[StateShard]) -> list[WeightShard]:
    """The pieces under the names that their tensors have in the files."""
    return [WeightShard(_key(kind, shard), shard.tensor, shard.layout) for kind, shard in shards]


def _key(kind: str, shard: WeightShard) -> str:
    return f"{kind}.{shard.name}"


def _check_shape(directory: Path, what: str, saved: Shape | None, held: Shape | None) -> None:
    if saved != held:
        raise EngineError(
            f"The checkpoint {directory} belongs to a different model: {what} {_has_shape(saved)} in the checkpoint,"
            f" but {_has_shape(held)} in this run's model.",
            remedy=SAME_MODEL,
        )


def _has_shape(shape: Shape | None) -> str:
    return "does not exist" if shape is None else f"has shape {shape}"


def _saved_steps(target: Path) -> int:
    try:
        numbers = json.loads((target / NUMBERS_FILE).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(target, error) from error
    if not isinstance(numbers, dict) or not isinstance(numbers.get(STEPS), int | float):
        raise _unreadable(target, f"{NUMBERS_FILE} must have the number '{STEPS}'")
    return int(numbers[STEPS])


def _unreadable(target: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"The optimizer's state in {target} cannot be read: {why}.",
        remedy="Use another checkpoint of the run, or start a new run with its model as model.path.",
    )


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    """Turns an error in a model directory into one in a checkpoint, with a remedy for a checkpoint."""
    try:
        yield
    except EngineError as error:
        raise CheckpointError(
            error.message,
            remedy="Check that this node sees the checkpoint's files; if they are lost, use another checkpoint of the"
            " run (trainer.resume=PATH).",
        ) from error


@contextmanager
def _state_errors(target: Path) -> Iterator[None]:
    """Turns an error in a directory of weights into one in the optimizer's state."""
    try:
        yield
    except EngineError as error:
        raise _unreadable(target, error.message.rstrip(".")) from error
