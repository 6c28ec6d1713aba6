"""FSDP and Megatron-Core: what each rank holds, ranks without work, memory that moves, failures."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training import setup as engine_setup
from hybridflow.engines.training.fsdp.engine import FsdpEngine
from hybridflow.engines.training.fsdp.sharding import rows_of
from hybridflow.engines.training.interface import Loss, LossFn, Part, TrainEngine
from hybridflow.engines.training.state_files import FIRST_MOMENT, SECOND_MOMENT
from hybridflow.errors import EngineError
from hybridflow.parallel.boxes import Box
from tests.parity.divided import Case, copies, engine_of, global_batch, loss_of, mesh_of, on, own_rows, train
from tests.spmd import preload, run_ranks
from tests.toys import logprobs_of, stepped
from tests.unit.engines.training.engines import is_freed_at_once, summed
from tests.unit.engines.training.late_link import late_link, waits

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def case_of(toy_dir, engine: str, architecture: str = "llama", kind: str = "language", **sizes: int) -> Case:
    layers = {"num_hidden_layers": 4} if engine == "megatron" else {}
    directory = toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS, **layers)
    return Case(directory, 2, TrainingEngine[engine], sizes, kind)


def alone(case: Case) -> Case:
    """The same training on one device."""
    return replace(case, engine=TrainingEngine.single, sizes={}, ranks=1)


def memory_of(engine: Any) -> list[Tensor]:
    """What holds a rank's parameters."""
    if isinstance(engine, FsdpEngine):
        return [parameter.memory for parameter in engine._parameters if parameter.memory.numel()]
    return [parameter for chunk in engine.chunks for parameter in chunk.parameters()]


def state_of(engine: Any) -> list[Tensor]:
    """What a rank's optimizer keeps in float32."""
    stepped = [*engine._stepped_tensors()]
    moments = [each.state[kind] for each in stepped for kind in (FIRST_MOMENT, SECOND_MOMENT) if kind in each.state]
    return moments + [each.tensor for each in stepped if each.is_copy]


def distances(memories: list[Tensor], firsts: dict[int, int] | None = None) -> tuple[dict[int, int], list[int]]:
    """For each tensor the first one in its storage (unless given), and how far behind it the tensor lies."""
    if firsts is None:
        starts = [memory.untyped_storage().data_ptr() for memory in memories]
        firsts = {number: starts.index(start) for number, start in enumerate(starts)}
    return firsts, [memories[n].data_ptr() - memories[first].data_ptr() for n, first in firsts.items()]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_rows_are_torchs_chunks(parts):
    for size in range(1, 12):
        chunks = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
        found = [rows_of(size, parts, index) for index in range(parts)]
        assert [high - low for low, high in found if high > low] == chunks
        assert [low for low, _ in found][1:] == [high for _, high in found][:-1]


def shards_of(rank: int, case: Case) -> tuple[list[tuple[str, Box, bytes]], int]:
    """A rank's pieces as loaded, and the elements that it has memory for."""
    engine = engine_of(case, rank)
    elements = sum(memory.numel() for memory in memory_of(engine))
    return [(s.name, s.layout.box, s.tensor.numpy().tobytes()) for s in copies(engine)], elements


@pytest.mark.parametrize(
    ("engine", "architecture", "ranks", "sizes", "copied"),
    [
        on("fsdp", "qwen3", 3, {}, 1),
        on("fsdp", "qwen3", 4, {"tensor": 2}, 1),
        on("fsdp", "qwen3_moe", 2, {}, 1),
        on("fsdp", "qwen3", 2, {"replicas": 2}, 2),
        on("megatron", "qwen3", 4, {"tensor": 2, "pipeline": 2}, 1),
        on("megatron", "qwen2", 2, {"pipeline": 2, "virtual_pipeline": 2}, 1),
        on("megatron", "qwen3_moe", 2, {"expert": 2}, 1),
    ],
)
def test_each_rank_holds_its_boxes_of_the_saved_weights_and_no_more(
    toy_dir, engine, architecture, ranks, sizes, copied
):
    case = replace(case_of(toy_dir, engine, architecture, **sizes), ranks=ranks)
    weights = load_file(case.directory / "model.safetensors")
    two_rows = sum(2 * weight.numel() // len(weight) for weight in weights.values())
    padding = two_rows if engine == "fsdp" else 0
    held: Counter[str] = Counter()
    for pieces, elements in run_ranks(shards_of, ranks, case):
        for name, box, values in pieces:
            part = weights[name][tuple(slice(low, high) for low, high in box)]
            assert values == part.contiguous().numpy().tobytes(), name
            held[name] += part.numel()
        assert 0 <= elements - sum(len(values) // 4 for _, _, values in pieces) <= padding
    assert held.keys() == weights.keys()
    for name in weights:
        if ".mlp." in name and name.endswith("proj.weight"):
            assert held[name] == copied * weights[name].numel(), name


def rolled_back(rank: int, case: Case) -> tuple[bool, bool]:
    """Whether a step changes a rank's weights, and whether the same step after a roll back gives the same bits."""
    engine, mesh = engine_of(case, rank), mesh_of(case)

    def after_step(seed: int) -> list[Tensor]:
        batch = global_batch(seed, "language")
        rows = own_rows(batch, mesh.index_along(rank, ("data",)), mesh.axis_size("data"))
        stepped(engine, rows, loss_of(batch, "language"))
        return [shard.tensor for shard in copies(engine)]

    after_step(0)
    kept = engine.snapshot()
    first, second = after_step(1), after_step(2)
    engine.roll_back(kept)
    again = after_step(1)
    return not all(map(torch.equal, first, second)), all(map(torch.equal, again, first))


@pytest.mark.parametrize(
    ("engine", "architecture", "ranks", "sizes"),
    [
        on("fsdp", "qwen3", 2, {}),
        on("fsdp", "qwen3_moe", 2, {}),
        on("megatron", "qwen3", 2, {"tensor": 2}),
        on("megatron", "llama", 2, {}),
    ],
)
@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
def test_a_snapshot_is_restored_bit_for_bit(toy_dir, engine, architecture, ranks, sizes, dtype):
    case = replace(case_of(toy_dir, engine, architecture, **sizes), ranks=ranks, dtype=dtype)
    assert run_ranks(rolled_back, ranks, case) == [(True, True)] * ranks


def idle_rank(rank: int, case: Case) -> tuple[list[float], float]:
    """One data-parallel rank has all rows, the other none."""
    engine, batch = engine_of(case, rank), global_batch(0, "language")
    rows = batch.slice(0, len(batch) if rank == 0 else 0)
    outputs = logprobs_of(engine, rows).values.tolist()
    return outputs, stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value


@pytest.mark.parametrize(
    ("engine", "architecture", "sizes"),
    [on("fsdp", "llama", {}), on("megatron", "llama", {}), on("megatron", "qwen3_moe", {"expert": 2})],
)
def test_a_rank_without_rows_takes_part(toy_dir, engine, architecture, sizes):
    case = replace(case_of(toy_dir, engine, architecture, **sizes), settings={"microbatch_tokens": 12})
    (outputs, norm), (none, other_norm) = run_ranks(idle_rank, 2, case)
    expected, expected_norm = idle_rank(0, alone(case))
    assert outputs == pytest.approx(expected, abs=5e-5) and none == []
    assert norm == other_norm == pytest.approx(expected_norm, rel=1e-5)


def broken_step(rank: int, case: Case) -> tuple[str, bool]:
    """The error on each rank when one rank's loss is not finite, and whether the weights stayed as they were."""
    engine, batch = engine_of(case, rank), global_batch(0, "language")
    before = copies(engine)
    share = len(batch) // mesh_of(case).axis_size("data")
    first = share * mesh_of(case).index_along(rank, ("data",))
    with pytest.raises(EngineError) as caught:
        stepped(engine, batch.slice(first, first + share), summed(times=torch.nan if rank == 1 else 1.0))
    same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(before, copies(engine), strict=True))
    return str(caught.value), same


@pytest.mark.parametrize(("engine", "sizes"), [on("fsdp", {}), on("megatron", {"pipeline": 2}), on("megatron", {})])
def test_a_gradient_that_is_not_finite_stops_every_rank_and_changes_nothing(toy_dir, engine, sizes):
    for message, same in run_ranks(broken_step, 2, case_of(toy_dir, engine, **sizes)):
        assert "norm is nan at optimizer step 1" in message and "Lower the learning rate" in message
        assert same


def move_between_steps(rank: int, case: Case, directory: Path) -> list[tuple[float, float]]:
    """Gradient norms of an engine whose memory stays, and of one whose memory moves (here from host to host)."""
    still, norms = engine_of(case, rank), []
    engine_setup.host_link = late_link
    engine: Any = engine_of(case, rank)
    for step in range(3):
        batch = global_batch(step, "language")
        loss_fn = loss_of(batch, "language")

        def watched(outputs, columns, engine=engine, loss_fn=loss_fn) -> Loss:
            assert all(waits(engine.pool, state) for state in state_of(engine)), "the state is on the device"
            return loss_fn(outputs, columns)

        loss_fn = LossFn(loss_fn.outputs, watched)
        norms.append(tuple(stepped(each, batch, loss_fn)["grad_norm"].value for each in (still, engine)))
        for module in engine.optimizer.modules if case.engine is TrainingEngine.megatron else ():
            assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in vars(module)["buffers"])
        logprobs_of(engine, batch)
        old, (firsts, apart) = copies(engine), distances(memory_of(engine))
        engine.offload(*Part)
        assert all(waits(engine.pool, memory) for memory in memory_of(engine))
        if step == 0:
            engine.save(directory)
            engine = engine_of(case, rank)
            engine.load(directory)
            continue
        engine.onload(Part.parameters)
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(copies(engine), old, strict=True))
        assert not any(waits(engine.pool, memory) for memory in memory_of(engine))
        assert distances(memory_of(engine), firsts)[1] == apart, "stacked matrices must lie one below the other"
    return norms


@pytest.mark.parametrize("dtype", [Dtype.float32, Dtype.bfloat16])
@pytest.mark.parametrize(
    ("engine", "sizes"), [on("fsdp", {}), on("megatron", {}), on("megatron", {"distributed_optimizer": False})]
)
def test_memory_that_moves_away_and_back_changes_nothing(toy_dir, tmp_path, engine, sizes, dtype):
    case = replace(case_of(toy_dir, engine, "qwen3", **sizes), dtype=dtype, settings={"offload_optimizer": True})
    for norms in run_ranks(move_between_steps, 2, case, tmp_path):
        assert all(still == moved for still, moved in norms)


def fail(engine: TrainEngine, batch: Batch) -> None:
    """A step whose loss fails once gradients of another microbatch are there."""
    plain, calls = loss_of(batch, "language"), []

    def loss_fn(outputs, columns) -> Loss:
        calls.append(None)
        if len(calls) > 1:
            raise KeyError("a column")
        return plain(outputs, columns)

    with pytest.raises(KeyError):
        stepped(engine, batch, LossFn(plain.outputs, loss_fn))


def after_a_failure(rank: int, case: Case, directory: Path) -> list[tuple[float, list[float]]]:
    """A step's norm, and what the model says once other weights were loaded: without and after a step that failed."""
    answers = []
    for fails in (False, True):
        engine, batch = engine_of(replace(case, settings={"microbatch_tokens": 12}), rank), global_batch(0, "language")
        if fails:
            fail(engine, batch)
        norm = stepped(engine, batch, loss_of(batch, "language"))["grad_norm"].value
        if fails:
            fail(engine, batch)
        engine.load(directory)
        answers.append((norm, logprobs_of(engine, batch).values.tolist()))
    return answers


@pytest.mark.parametrize("sizes", [{}, {"replicas": 2}])
def test_a_step_that_failed_leaves_neither_gradients_nor_gathered_weights(toy_dir, tmp_path, sizes):
    case = case_of(toy_dir, "fsdp", **sizes)
    train(replace(alone(case), steps=2, save_to=tmp_path))
    for expected, found in run_ranks(after_a_failure, 2, case, tmp_path):
        assert found == expected


def freed_on_rank(rank: int, case: Case) -> bool:
    """Whether a rank's engine goes with the last reference to it."""
    return is_freed_at_once(lambda: engine_of(case, rank), global_batch(0, "language"))


@pytest.mark.parametrize(("engine", "sizes"), [on("fsdp", {}), on("megatron", {"tensor": 2})])
def test_an_engine_without_references_is_freed_at_once(toy_dir, engine, sizes):
    assert all(run_ranks(freed_on_rank, 2, case_of(toy_dir, engine, **sizes)))
