"""Megatron-Core alone: padded vocabularies, engines side by side in one process, models that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.training.megatron.engine import MegatronEngine
from hybridflow.errors import EngineError
from hybridflow.observability.metrics import Metrics
from tests.parity.divided import Case, engine_of, global_batch, loss_of
from tests.spmd import preload, run_ranks
from tests.toys import TEMPERATURE, logprobs_of, stepped

preload("hybridflow.engines.training.megatron.engine")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}


def case_of(directory: Path, ranks: int, kind: str = "language", **sizes: int) -> Case:
    return Case(directory, ranks, TrainingEngine.megatron, sizes, kind)


def megatron_engine(case: Case, rank: int) -> MegatronEngine:
    engine = engine_of(case, rank)
    assert isinstance(engine, MegatronEngine)
    return engine


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


def refusal(rank: int, case: Case) -> str:
    with pytest.raises(EngineError) as caught:
        engine_of(case, rank)
    return str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("llama", {"hidden_act": "gelu"}, "the activation 'gelu'"),
        ("llama", {"attention_bias": True}, "output projection"),
        ("mistral", {"sliding_window": 16}, "sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic'"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "layers with and without experts"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_with_a_remedy(toy_dir, architecture, changes, words):
    (message,) = run_ranks(refusal, 1, case_of(toy_dir(architecture, **(HEADS | changes)), 1))
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
