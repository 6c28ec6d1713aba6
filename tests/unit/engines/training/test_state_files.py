"""An engine's state saved in one layout and read in another is the same, number for number."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hybridflow.engines.training.state_files import (
    FIRST_MOMENT,
    MASTER,
    SECOND_MOMENT,
    StateShard,
    load_state,
    load_weights,
    plan_state,
    plan_weights,
)
from hybridflow.errors import CheckpointError, EngineError
from hybridflow.parallel.boxes import Box, slices_within
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import TensorLayout, WeightShard
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import run_ranks
from tests.unit.controller.test_store_attacks import Payload

WEIGHTS = {
    "model.embed.weight": (7, 4),
    "model.up.weight": (6, 4),
    "model.down.weight": (4, 6),
    "model.norm.weight": (4,),
}
KINDS = (FIRST_MOMENT, SECOND_MOMENT)

Boxes = Callable[[str, int, int], list[Box]]
"""The boxes of a weight on a rank of so many."""


def whole(name: str, rank: int, size: int) -> list[Box]:
    return [tuple((0, n) for n in WEIGHTS[name])]


def tensor_parallel(name: str, rank: int, size: int) -> list[Box]:
    """Rows, but columns of `down`, and vectors whole; the last rank may have no row."""
    shape, dim = WEIGHTS[name], 1 if "down" in name else 0
    if len(shape) == 1:
        return whole(name, rank, size)
    each = -(-shape[dim] // size)
    bounds = (min(shape[dim], rank * each), min(shape[dim], (rank + 1) * each))
    return [tuple(bounds if d == dim else (0, n) for d, n in enumerate(shape))]


def flat_ranges(name: str, rank: int, size: int) -> list[Box]:
    """An equal run of each weight's elements, which begins and ends within rows, as a distributed optimizer has it."""
    rows, columns = (*WEIGHTS[name], 1)[:2]
    start, stop = (index * rows * columns // size for index in (rank, rank + 1))
    cells = [(i // columns, i % columns) for i in range(start, stop)]
    boxes = [((row, row + 1), (column, column + 1)) for row, column in cells]
    return [box[: len(WEIGHTS[name])] for box in boxes]


LAYOUTS: dict[str, Boxes] = {"whole": whole, "tensor": tensor_parallel, "flat": flat_ranges}


def truth(kind: str, name: str) -> torch.Tensor:
    """What a kind of state of a weight is."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind + name)))
    return torch.randn(WEIGHTS[name], generator=generator)


def shards_of(kind: str, layout: str, rank: int, size: int, fill: bool) -> list[WeightShard]:
    shards = []
    for name, shape in WEIGHTS.items():
        for box in LAYOUTS[layout](name, rank, size):
            tensor = truth(kind, name)[slices_within(box, TensorLayout.full(shape).box)]
            shards.append(WeightShard(name, tensor if fill else torch.full_like(tensor, 9.0), TensorLayout(shape, box)))
    return shards


def state_of(layout: str, rank: int, size: int, fill: bool, kinds: tuple[str, ...] = KINDS) -> list[StateShard]:
    return [(kind, shard) for kind in kinds for shard in shards_of(kind, layout, rank, size, fill)]


def ranks_of(rank: int, size: int) -> Ranks:
    return Ranks(rank, ParallelMesh({"data": size}))


def save_all(rank: int, size: int, layout: str, directory: Path) -> None:
    ranks = ranks_of(rank, size)
    weights = shards_of("weight", layout, rank, size, fill=True)
    plan_weights(directory, weights, ranks, write_rest=lambda directory: None).write()
    plan_state(directory, state_of(layout, rank, size, fill=True), 3, ranks).write()


def load_all(rank: int, size: int, layout: str, directory: Path) -> int:
    ranks = ranks_of(rank, size)
    weights = shards_of("weight", layout, rank, size, fill=False)
    state = state_of(layout, rank, size, fill=False)
    load_weights(directory, weights, ranks)
    steps = load_state(directory, state, ranks)
    for kind, shard in [*(("weight", shard) for shard in weights), *state]:
        box = slices_within(shard.layout.box, TensorLayout.full(shard.layout.shape).box)
        assert torch.equal(shard.tensor, truth(kind, shard.name)[box]), (kind, shard.name)
    return steps


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ((1, "whole"), (2, "tensor")),
        ((2, "tensor"), (1, "whole")),
        ((2, "tensor"), (4, "flat")),
        ((4, "tensor"), (2, "flat")),
        ((3, "flat"), (4, "tensor")),
        ((2, "whole"), (3, "flat")),
    ],
)
def test_state_saved_in_one_layout_is_the_same_in_another(tmp_path, saved, read):
    run_ranks(save_all, saved[0], *saved, tmp_path)
    assert run_ranks(load_all, read[0], *read, tmp_path) == [3] * read[0]


def test_a_view_into_a_larger_tensor_is_saved_and_filled_as_it_is(tmp_path):
    held = torch.arange(24.0).view(4, 6)
    view = WeightShard("w", held.t()[1:3], TensorLayout.full((2, 4)))
    plan_state(tmp_path, [(FIRST_MOMENT, view)], 0, Ranks.alone()).write()
    before, held[:] = held.clone(), 0.0
    load_state(tmp_path, [(FIRST_MOMENT, view)], Ranks.alone())
    assert torch.equal(held[:, 1:3], before[:, 1:3])
    assert held.sum() == before[:, 1:3].sum()
    files = sum(path.stat().st_size for path in (tmp_path / "optimizer").glob("*.safetensors"))
    assert files < 4000


def test_moments_that_were_not_there_yet_are_zero(tmp_path):
    plan_state(tmp_path, [], 0, Ranks.alone()).write()
    state = state_of("whole", 0, 1, fill=False)
    assert load_state(tmp_path, state, Ranks.alone()) == 0
    assert all(not shard.tensor.any() for _, shard in state)


def test_a_float32_copy_that_was_not_saved_is_the_saved_weight(tmp_path):
    save_all(0, 1, "whole", tmp_path)
    copies = shards_of("weight", "tensor", 1, 2, fill=False)
    load_state(tmp_path, [(MASTER, copy) for copy in copies], Ranks.alone())
    expected = shards_of("weight", "tensor", 1, 2, fill=True)
    assert all(torch.equal(copy.tensor, weight.tensor) for copy, weight in zip(copies, expected, strict=True))


def test_a_float32_copy_that_was_saved_is_taken_before_the_rounded_weight(tmp_path):
    exact = WeightShard.full("w", torch.rand(5))
    rounded = WeightShard.full("w", exact.tensor.bfloat16())
    plan_weights(tmp_path, [rounded], Ranks.alone(), write_rest=lambda directory: None).write()
    plan_state(tmp_path, [(MASTER, exact)], 0, Ranks.alone()).write()
    read, copy = WeightShard.full("w", torch.zeros(5)), WeightShard.full("w", torch.zeros(5))
    load_weights(tmp_path, [read], Ranks.alone())
    assert torch.equal(read.tensor, rounded.tensor.float())
    kept = WeightShard.full("v", torch.ones(5))
    load_state(tmp_path, [(MASTER, copy)], Ranks.alone(), own_copies=[read, kept])
    assert torch.equal(copy.tensor, exact.tensor) and torch.equal(read.tensor, exact.tensor)
    assert torch.equal(kept.tensor, torch.ones(5))


@pytest.mark.parametrize(
    ("left_out", "added", "words"),
    [
        (
            None,
            WeightShard.full("model.more.weight", torch.zeros(2)),
            r"more.weight' does not exist in the checkpoint, but has shape \(2,\) in",
        ),
        ("model.norm.weight", None, r"'model.norm.weight' has shape \(4,\) in the checkpoint, but does not exist in"),
        (
            "model.norm.weight",
            WeightShard.full("model.norm.weight", torch.zeros(3)),
            r"has shape \(4,\) in the checkpoint, but has shape \(3,\) in",
        ),
    ],
)
def test_weights_of_another_model_are_named_before_a_weight_is_changed(tmp_path, left_out, added, words):
    save_all(0, 1, "whole", tmp_path)
    shards = [shard for shard in shards_of("weight", "whole", 0, 1, fill=False) if shard.name != left_out]
    with pytest.raises(EngineError, match=words) as caught:
        load_weights(tmp_path, [*shards, *([added] if added else [])], Ranks.alone())
    assert "model.path" in caught.value.remedy
    assert all((shard.tensor == 9.0).all() for shard in shards)


def test_a_checkpoint_without_its_model_is_not_blamed_on_a_setting_of_the_model(tmp_path):
    (tmp_path / "huggingface").mkdir()
    with pytest.raises(CheckpointError, match=r"no \.safetensors files in .*huggingface") as caught:
        load_weights(tmp_path, shards_of("weight", "whole", 0, 1, fill=False), Ranks.alone())
    assert "another checkpoint of the run (trainer.resume=PATH)" in caught.value.remedy
    assert "model.path" not in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in ("numbers.json", "model.safetensors") for content in (None, "pickle")),
        *(("numbers.json", content) for content in ("[" * 200_000, '["steps"]', '{"steps": "3"}')),
    ],
)
def test_state_that_cannot_be_read_is_an_error_of_ours_and_runs_no_code(tmp_path, name, content):
    save_all(0, 1, "whole", tmp_path)
    path, mark = tmp_path / "optimizer" / name, tmp_path / "mark"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(pickle.dumps(Payload(mark)) if content == "pickle" else content.encode())
    with pytest.raises(CheckpointError, match="optimizer's state in .*cannot be read.*another checkpoint"):
        load_state(tmp_path, state_of("whole", 0, 1, fill=False), Ranks.alone())
    assert not mark.exists()


def load_what_one_rank_cannot_read(rank: int, directory: Path) -> str:
    shards = [] if rank == 0 else [WeightShard.full("model.norm.weight", torch.zeros(5))]
    try:
        load_state(directory, [(FIRST_MOMENT, shard) for shard in shards], ranks_of(rank, 2))
    except EngineError as error:
        return str(error)
    return "read"


def test_state_that_one_rank_cannot_take_is_refused_by_all(tmp_path):
    save_all(0, 1, "whole", tmp_path)
    for answer in run_ranks(load_what_one_rank_cannot_read, 2, tmp_path):
        assert (
            "a different model: exp_avg of 'model.norm.weight' has shape (4,) in the checkpoint, but has shape (5,)"
            in answer
        )


def save_to_a_file(rank: int, directory: Path) -> str:
    try:
        plan_state(directory, state_of("whole", rank, 2, fill=True), 0, ranks_of(rank, 2)).write()
    except (CheckpointError, EngineError, OSError) as error:
        return str(error)
    return "written"


def test_a_directory_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "optimizer").write_text("in the way")
    for answer in run_ranks(save_to_a_file, 2, tmp_path):
        assert "optimizer" in answer
