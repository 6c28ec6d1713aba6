"""What a rank holds and where, ranks with less to do than others, memory that moves, gradients that are not finite."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.model import Dtype
from hybridflow.config.training import Optimizer, TrainingEngine
from hybridflow.engines.training import setup as engine_setup
from hybridflow.engines.training.fsdp.engine import FsdpEngine
from hybridflow.engines.training.fsdp.sharding import rows_of
from hybridflow.engines.training.interface import Loss, LossFn, Part, TrainEngine
from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import Box
from tests.parity.divided import Case, assembled, copies, engine_of, global_batch, loss_of, train
from tests.spmd import run_ranks
from tests.toys import logprobs_of, sequences, stepped
from tests.unit.engines.training.engines import is_freed_at_once, likelihood_loss, summed
from tests.unit.engines.training.late_lane import late_lane, waits

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def case_of(toy_dir, architecture: str, ranks: int, kind: str = "language", **sizes: int) -> Case:
    return Case(toy_dir(architecture, **HEADS), ranks, TrainingEngine.fsdp, sizes, kind)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_rows_are_torchs_chunks(parts):
    for size in range(1, 12):
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
        found = [rows_of(size, parts, index) for index in range(parts)]
        assert [high - low for low, high in found if high > low] == chunks
        assert [low for low, _ in found][1:] == [high for _, high in found][:-1]


def shards_of(rank: int, case: Case) -> tuple[list[tuple[str, Box, bytes]], int]:
    """A rank's pieces as loaded, and the elements it has memory for."""
    engine = engine_of(case, rank)
    assert isinstance(engine, FsdpEngine)
    memory = sum(parameter.memory.untyped_storage().nbytes() // 4 for parameter in engine._parameters)
    return [(s.name, s.layout.box, s.tensor.numpy().tobytes()) for s in copies(engine)], memory


def whole_weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "ranks", "sizes"),
    [("qwen3", 3, {}), ("qwen3", 4, {"tensor": 2}), ("qwen3_moe", 2, {}), ("qwen3", 2, {"replicas": 2})],
)
def test_each_rank_reads_its_boxes_and_has_memory_for_no_more(toy_dir, architecture, ranks, sizes):
    case = case_of(toy_dir, architecture, ranks, **sizes)
    weights = whole_weights(case.directory)
    total = sum(weight.numel() for weight in weights.values())
    shares = ranks // sizes.get("replicas", 1)
    rows_filled_up = sum(weight.numel() // len(weight) for weight in weights.values())
    for pieces, memory in run_ranks(shards_of, ranks, case):
        norms = sum(w.numel() for name, w in weights.items() if "norm" in name) if "tensor" in sizes else 0
        assert memory <= total / shares + norms + 2 * rows_filled_up
        for name, box, data in pieces:
            expected = weights[name][tuple(slice(low, high) for low, high in box)]
            assert expected.contiguous().numpy().tobytes() == data, name


def test_a_rank_may_hold_no_row_of_a_weight(toy_dir):
    answers = run_ranks(shards_of, 2, case_of(toy_dir, "llama", 2, "value"))
    boxes = [{name: box for name, box, _ in pieces}["score.weight"] for pieces, _ in answers]
    assert boxes == [((0, 1), (0, 64)), ((1, 1), (0, 64))]


def uneven_work(rank: int, case: Case, own: tuple[tuple[int, int], ...]) -> tuple[list[float], list[float], list[int]]:
    """A step on given rows of a batch, in micro-batches of 12 tokens."""
    engine = engine_of(replace(case, settings={"microbatch_tokens": 12}), rank)
    batch = global_batch(0, "language")
    low, high = own[rank]
    rows = batch.slice(low, high)
    outputs = logprobs_of(engine, rows)
    norm = stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value
    return outputs.values.tolist(), [norm, *copies(engine)[0].tensor[0].tolist()], outputs.lengths.tolist()


def test_ranks_with_fewer_rows_or_none_keep_step(toy_dir):
    case = case_of(toy_dir, "llama", 2)
    (even, other_half), (first, none) = (
        run_ranks(uneven_work, 2, case, own) for own in [((0, 3), (3, 6)), ((0, 6), (6, 6))]
    )
    assert none[0] == [] and none[2] == []
    assert first[0] == pytest.approx(even[0] + other_half[0], abs=1e-5)
    assert first[2] == even[2] + other_half[2]
    assert first[1] == pytest.approx(even[1], rel=1e-4, abs=1e-6)


def moved_and_not(rank: int, case: Case, directory: Path) -> list[list[float]]:
    """Three steps, of one engine whose memory moves between them and of one whose memory does not.

    Both are saved and made anew after the first step.
    """
    numbers = []
    for moves in (False, True):
        if moves:
            engine_setup.lane_to = late_lane
        engine, own = engine_of(case, rank), []
        assert isinstance(engine, FsdpEngine)
        for step in range(3):
            batch = global_batch(step, "language")
            own.append(
                stepped(engine, batch.slice(3 * rank, 3 * rank + 3), loss_of(batch, "language"))["grad_norm"].value
            )
            own.append(sum(float(shard.tensor.double().square().sum()) for shard in engine.weight_shards()))
            engine.offload(*Part)
            moved = [*(parameter.memory for parameter in engine._parameters), *engine.optimizer.weight_of]
            assert all(waits(engine.shelf, memory) is moves for memory in moved if memory.numel())
            if step == 0:
                engine.save(directory / str(moves))
                engine = engine_of(case, rank)
                engine.load(directory / str(moves))
        numbers.append(own)
    return numbers


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_memory_may_move_between_steps_and_on_a_cpu_does_not_by_itself(toy_dir, tmp_path, dtype):
    case = replace(case_of(toy_dir, "qwen3", 2), settings={"offload_optimizer": True}, dtype=dtype)
    for still, moved in run_ranks(moved_and_not, 2, case, tmp_path):
        assert still == moved


def not_finite(rank: int, case: Case) -> list[str]:
    """The error on each rank when one rank's loss is not finite, and that the weights were not touched."""
    engine, batch = engine_of(case, rank), global_batch(0, "language")
    before = copies(engine)

    with pytest.raises(EngineError) as caught:
        stepped(engine, batch.slice(3 * rank, 3 * rank + 3), summed(times=torch.inf if rank == 1 else 1.0))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(copies(engine), before, strict=True))
    return [caught.value.message, caught.value.remedy]


def test_a_gradient_that_is_not_finite_stops_every_rank(toy_dir):
    for message, remedy in run_ranks(not_finite, 2, case_of(toy_dir, "llama", 2)):
        assert "at optimizer step 1" in message and "learning rate" in remedy


def fail(engine: TrainEngine, batch: Batch) -> None:
    """A step whose loss fails once gradients of another micro-batch are there."""
    plain, calls = loss_of(batch, "language"), []

    def loss_fn(outputs, columns) -> Loss:
        calls.append(None)
        if len(calls) > 1:
            raise KeyError("a column")
        return plain(outputs, columns)

    with pytest.raises(KeyError):
        stepped(engine, batch, LossFn(plain.outputs, loss_fn))


def fails_once(rank: int, case: Case) -> list[float]:
    """The norm of a step, without and after a step that failed."""
    norms = []
    for fails in (False, True):
        engine, batch = engine_of(replace(case, settings={"microbatch_tokens": 12}), rank), global_batch(0, "language")
        if fails:
            fail(engine, batch)
        norms.append(stepped(engine, batch, loss_of(batch, "language"))["grad_norm"].value)
    return norms


@pytest.mark.parametrize("sizes", [{}, {"replicas": 2}])
def test_gradients_of_a_step_that_failed_are_forgotten(toy_dir, sizes):
    for norm, again in run_ranks(fails_once, 2, case_of(toy_dir, "llama", 2, **sizes)):
        assert norm == again


def loaded_after_a_failure(rank: int, case: Case, directory: Path) -> list[list[float]]:
    """What a model says once other weights were loaded, without and after a step that failed."""
    answers = []
    for fails in (False, True):
        engine, batch = engine_of(replace(case, settings={"microbatch_tokens": 12}), rank), global_batch(0, "language")
        if fails:
            fail(engine, batch)
        engine.load(directory)
        answers.append(logprobs_of(engine, batch).values.tolist())
    return answers


@pytest.mark.parametrize("sizes", [{}, {"replicas": 2}])
def test_a_step_that_failed_hides_no_later_change_of_the_weights(toy_dir, tmp_path, sizes):
    case = case_of(toy_dir, "llama", 2, **sizes)
    train(replace(case, steps=2, save_to=tmp_path))
    for answers, again in run_ranks(loaded_after_a_failure, 2, case, tmp_path):
        assert answers == again


def losses_of_small_steps(rank: int, case: Case) -> tuple[float, float]:
    """The loss before the first and before the last of many steps, each too small for a weight in bfloat16."""
    small = Optimizer(learning_rate=2e-5, weight_decay=0.0)
    engine, batch = engine_of(replace(case, settings={"optimizer": small}), rank), sequences()
    share = len(batch) // case.ranks
    rows = batch.slice(share * rank, len(batch) if rank == case.ranks - 1 else share * (rank + 1))
    losses = [stepped(engine, rows, likelihood_loss)["loss"].value for _ in range(40)]
    return losses[0], losses[-1]


def test_bfloat16_learns_in_steps_smaller_than_it_can_tell_apart(toy_dir):
    case = case_of(toy_dir, "llama", 2)
    found = run_ranks(losses_of_small_steps, 2, replace(case, dtype=Dtype.bfloat16))
    exact = losses_of_small_steps(0, replace(case, ranks=1, engine=TrainingEngine.single))
    learned = sum(before - after for before, after in found)
    # Rounded weights lose part of 40 steps of 2e-5 at any moment, and none for good.
    assert learned == pytest.approx(exact[0] - exact[1], rel=0.2)


def test_assembled_weights_need_every_rank(toy_dir):
    """The check that parity rests on: a missing piece is seen."""
    case = case_of(toy_dir, "llama", 1)
    shards = copies(engine_of(case))
    assert assembled(shards).keys() == whole_weights(case.directory).keys()
    with pytest.raises(AssertionError, match="no rank holds"):
        first = shards[0]
        half = replace(first.layout, box=((0, 32), *first.layout.box[1:]))
        assembled([replace(first, tensor=first.tensor[:32], layout=half)])


def test_an_engine_without_references_is_freed_at_once(toy_dir):
    case = case_of(toy_dir, "llama", 1)
    assert is_freed_at_once(lambda: engine_of(case), sequences())
