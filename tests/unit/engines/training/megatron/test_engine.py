"""Engines side by side in one process, ranks with nothing to do, what is refused, and memory that moves."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.config.model import Dtype
from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training import setup as engine_setup
from hybridflow.engines.training.interface import Loss, LossFn, Part
from hybridflow.engines.training.megatron.engine import MegatronEngine
from hybridflow.engines.training.megatron.stacked_linear import StackedLinear, stacked
from hybridflow.errors import EngineError, HybridflowError
from hybridflow.observability.metrics import Metrics
from hybridflow.parallel.boxes import Box
from tests.parity.divided import Case, copies, engine_of, global_batch, loss_of
from tests.spmd import preload, run_ranks
from tests.toys import TEMPERATURE, logprobs_of, stepped
from tests.unit.engines.training.engines import is_freed_at_once, summed
from tests.unit.engines.training.late_lane import late_lane, waits

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


def case_of(directory: Path, ranks: int, kind: str = "language", **sizes: int) -> Case:
    return Case(directory, ranks, TrainingEngine.megatron, sizes, kind)


def megatron_engine(case: Case, rank: int) -> MegatronEngine:
    engine = engine_of(case, rank)
    assert isinstance(engine, MegatronEngine)
    return engine


def shards_of(rank: int, case: Case) -> tuple[list[tuple[str, Box, bytes]], int]:
    """A rank's pieces as loaded, and the elements of its parameters."""
    engine = megatron_engine(case, rank)
    elements = sum(parameter.numel() for chunk in engine.chunks for parameter in chunk.parameters())
    return [(s.name, s.layout.box, s.tensor.numpy().tobytes()) for s in copies(engine)], elements


@pytest.mark.parametrize(
    ("architecture", "ranks", "sizes"),
    [
        ("qwen3", 4, {"tensor": 2, "pipeline": 2}),
        ("qwen2", 2, {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3_moe", 2, {"expert": 2}),
    ],
)
def test_each_rank_holds_its_boxes_of_the_saved_weights_and_no_more(toy_dir, architecture, ranks, sizes):
    case = case_of(toy_dir(architecture, tie_word_embeddings=architecture == "qwen3", **HEADS), ranks, **sizes)
    weights = load_file(case.directory / "model.safetensors")
    names = set()
    for pieces, elements in run_ranks(shards_of, ranks, case):
        for name, box, values in pieces:
            part = weights[name][tuple(slice(low, high) for low, high in box)]
            assert values == part.contiguous().numpy().tobytes(), name
        names |= {name for name, _, _ in pieces}
        held = sum(len(values) // 4 for _, _, values in pieces)
        assert held == elements
    assert names == weights.keys()


def padding_and_buffers(rank: int, case: Case) -> tuple[float, list[int]]:
    """The sum of a padded embedding's last rows, and the memory of the optimizer's weights between steps."""
    engine, batch = megatron_engine(case, rank), global_batch(0, "language")
    for _ in range(2):
        stepped(engine, batch, loss_of(batch, "language"))
    table = dict(engine.chunks[0].named_parameters())["embedding.word_embeddings.weight"]
    buffers = [buffer for module in engine.optimizer.modules for buffer in vars(module)["buffers"]]
    return float(table[67:].abs().sum()), [buffer.param_data.untyped_storage().nbytes() for buffer in buffers]


def test_padding_is_zero_and_the_optimizers_buffer_is_gone_between_steps(toy_dir):
    case = case_of(toy_dir("llama", vocab_size=67, **HEADS), 2)
    assert run_ranks(padding_and_buffers, 2, case) == [(0.0, [0])] * 2


def alternate(rank: int, first: Case, second: Case) -> list[Metrics]:
    """Two engines of different layouts in one process, a step of each in turn."""
    engines = [megatron_engine(first, rank), megatron_engine(second, rank)]
    reports = []
    for step in range(2):
        for engine, case in zip(engines, (first, second), strict=True):
            batch = global_batch(step, case.kind)
            loss_fn = loss_of(batch, case.kind)
            engine.forward(batch, loss_fn.outputs, temperature=TEMPERATURE)
            reports.append(stepped(engine, batch, loss_fn))
    return reports


def test_an_actor_and_a_critic_of_different_layouts_share_a_process(toy_dir):
    directory = toy_dir("llama", **HEADS)
    actor, critic = case_of(directory, 2, tensor=2), case_of(directory, 2, "value", pipeline=2)
    ranks = run_ranks(alternate, 2, actor, critic)
    plain = []
    engines = [engine_of(replace(case, engine=TrainingEngine.single, sizes={}, ranks=1)) for case in (actor, critic)]
    for step in range(2):
        for engine, kind in zip(engines, ("language", "value"), strict=True):
            batch = global_batch(step, kind)
            plain.append(stepped(engine, batch, loss_of(batch, kind)))
    for reports in ranks:
        for found, expected in zip(reports, plain, strict=True):
            assert found.keys() == expected.keys(), "every stage reports what the last one knows"
            for name, measure in expected.items():
                assert found[name].value == pytest.approx(measure.value, rel=1e-4, abs=1e-6), name


def idle_rank(rank: int, case: Case) -> tuple[list[float], float, list[tuple[str, Box, torch.Tensor]]]:
    """One data-parallel rank has all rows, the other none."""
    engine, batch = megatron_engine(case, rank), global_batch(0, "language")
    rows = batch.slice(0, len(batch) if rank == 0 else 0)
    outputs = logprobs_of(engine, rows).values.tolist()
    norm = stepped(engine, rows, loss_of(batch, "language"))["grad_norm"].value
    return outputs, norm, [(s.name, s.layout.box, s.tensor.numpy()) for s in copies(engine)]


@pytest.mark.parametrize(("architecture", "sizes"), [("llama", {}), ("qwen3_moe", {"expert": 2})])
def test_a_rank_without_rows_takes_part(toy_dir, architecture, sizes):
    case = case_of(toy_dir(architecture, **HEADS), 2, **sizes)
    first, second = run_ranks(idle_rank, 2, case)
    batch = global_batch(0, "language")
    plain = engine_of(replace(case, engine=TrainingEngine.single, sizes={}, ranks=1))
    assert first[0] == pytest.approx(logprobs_of(plain, batch).values.tolist(), abs=5e-5)
    assert second[0] == []
    norm = stepped(plain, batch, loss_of(batch, "language"))["grad_norm"].value
    assert first[1] == second[1] == pytest.approx(norm, rel=1e-5)


def broken_step(rank: int, case: Case) -> tuple[str, bool]:
    """What a rank says of a loss that is not a number, and whether its weights stayed as they were."""
    engine, batch = megatron_engine(case, rank), global_batch(0, "language")
    before = copies(engine)

    with pytest.raises(EngineError) as caught:
        stepped(engine, batch, summed(times=torch.nan))
    same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(before, copies(engine), strict=True))
    return str(caught.value), same


@pytest.mark.parametrize("sizes", [{"pipeline": 2}, {}])
def test_a_gradient_that_is_not_finite_stops_every_rank_and_changes_nothing(toy_dir, sizes):
    case = case_of(toy_dir("llama", **HEADS), 2, **sizes)
    for message, same in run_ranks(broken_step, 2, case):
        assert "norm is nan at optimizer step 1" in message and "Lower the learning rate" in message
        assert same


def refusal(rank: int, case: Case) -> tuple[type[HybridflowError], str]:
    with pytest.raises(HybridflowError) as caught:
        engine_of(case, rank)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "sizes", "kind", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, {"tensor": 2}, EngineError, "the activation 'gelu'"),
        ("llama", {"attention_bias": True}, {}, EngineError, "output projection"),
        ("mistral", {"sliding_window": 16}, {}, EngineError, "sliding window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            {},
            EngineError,
            "rotary positions of type 'dynamic'",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {}, EngineError, "layers without experts"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_a_remedy(toy_dir, architecture, changes, sizes, kind, words):
    ranks = max(1, *sizes.values()) if sizes else 1
    case = case_of(toy_dir(architecture, **(HEADS | changes)), ranks, **sizes)
    for found, message in run_ranks(refusal, ranks, case):
        assert found is kind
        assert words in message and "fsdp" in message


def test_rotary_positions_are_scaled_as_the_model_says(toy_dir):
    """Llama 3's scaling changes these positions' log-probabilities by more than 0.01."""
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    plain, other = (case_of(toy_dir("llama", **changes, **HEADS), 1) for changes in ({}, {"rope_parameters": scaled}))
    found, (unscaled,) = run_ranks(forward_alone, 1, other)[0], run_ranks(forward_alone, 1, plain)
    assert found == pytest.approx(forward_alone(0, replace(other, engine=TrainingEngine.single)), abs=5e-5)
    assert max(abs(a - b) for a, b in zip(found, unscaled, strict=True)) > 0.01


def forward_alone(rank: int, case: Case) -> list[float]:
    return logprobs_of(engine_of(case, rank), global_batch(0, case.kind)).values.tolist()


def move_between_steps(rank: int, case: Case, directory: Path) -> list[tuple[float, float]]:
    """Gradient norms of an engine whose memory moves between steps (here from the host to the host), and of another."""
    still, norms = megatron_engine(case, rank), []
    engine_setup.lane_to = late_lane
    engine = megatron_engine(case, rank)
    for step in range(3):
        batch = global_batch(step, "language")
        loss_fn = loss_of(batch, "language")

        def watched(outputs, columns, engine=engine, loss_fn=loss_fn) -> Loss:
            moments = (shard.tensor for _, shard in engine.optimizer.state_shards())
            assert all(waits(engine.shelf, moment) for moment in moments), "the state is on the device during a pass"
            return loss_fn(outputs, columns)

        norms.append(
            tuple(stepped(each, batch, LossFn(loss_fn.outputs, watched))["grad_norm"].value for each in (still, engine))
        )
        for module in engine.optimizer.modules:
            assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in vars(module)["buffers"])
        logprobs_of(engine, batch)
        parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
        old = [parameter.detach().clone() for parameter in parameters]
        engine.offload(*Part)
        assert all(waits(engine.shelf, parameter) for parameter in parameters)
        if step == 0:
            engine.save(directory)
            engine = megatron_engine(case, rank)
            engine.load(directory)
            continue
        engine.onload(Part.parameters)
        assert all(map(torch.equal, parameters, old))
        assert not any(waits(engine.shelf, parameter) for parameter in parameters)
        linears = [m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, StackedLinear)]
        assert linears and all(stacked([weight.data for weight in linear.weights]) is not None for linear in linears)
    return norms


def parts_away(rank: int, case: Case, directory: Path) -> list[set[Part]]:
    """What is away after a save, a load, and once the weights were read, of an engine all of which was away."""
    engine = megatron_engine(case, rank)
    engine.offload(*Part)
    found = []
    for deed in (lambda: engine.save(directory), lambda: engine.load(directory), engine.weight_shards):
        deed()
        found.append(set(engine.away))
    return found


def test_what_was_away_before_it_was_saved_or_loaded_is_away_again(toy_dir, tmp_path):
    (found,) = run_ranks(parts_away, 1, case_of(toy_dir("llama", **HEADS), 1), tmp_path)
    assert found == [set(Part), set(Part), {Part.optimizer}]


@pytest.mark.parametrize(
    ("dtype", "divided"),
    [(Dtype.float32, True), (Dtype.bfloat16, True), (Dtype.float32, False), (Dtype.bfloat16, False)],
)
def test_memory_that_moves_away_and_back_changes_nothing(toy_dir, tmp_path, dtype, divided):
    directory = toy_dir("qwen3", tie_word_embeddings=True, **HEADS)
    settings = {"offload_optimizer": True}
    case = replace(case_of(directory, 2, distributed_optimizer=divided), dtype=dtype, settings=settings)
    for norms in run_ranks(move_between_steps, 2, case, tmp_path):
        assert all(still == moved for still, moved in norms)


def freed_on_rank(rank: int, case: Case) -> bool:
    """Whether a rank's engine goes with the last reference to it."""
    return is_freed_at_once(lambda: megatron_engine(case, rank), global_batch(0, "language"))


def test_an_engine_without_references_is_freed_at_once(toy_dir):
    assert all(run_ranks(freed_on_rank, 2, case_of(toy_dir("llama", **HEADS), 2, tensor=2)))
