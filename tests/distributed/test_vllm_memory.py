"""Training and vLLM in one process on one set of weights: what that saves, and what a sleep gives back."""

import gc
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from hybridflow.engines.rollout.memory import Released, trim_heap
from hybridflow.models.loading import load_causal_lm
from tests.spmd import preload, run_ranks
from tests.toys import sequences, stepped
from tests.unit.engines.rollout.rows import greedy_answers, prompt_rows, write_slots
from tests.unit.engines.training.engines import language_engine, likelihood_loss, weights
from tests.vllm_ranks import TOKENS, all_prompts, answered, engine_on

preload("tests.vllm_preload")
pytestmark = pytest.mark.vllm
MB = 1 << 20
ALONE = {"data": 1, "tensor": 1}
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8}
MODEL = SIZES | {"num_hidden_layers": 4, "initializer_range": 0.05}
WEIGHTS_MB = 60
"""4 layers of 3.9 M float32 numbers."""

CACHE_MB = 27
"""Half of 128 sequences of 56 + 8 tokens, of 8 KB each: the most recent ones stay for their siblings."""


@dataclass(frozen=True)
class Shared:
    """What a training engine and a rollout engine in one process share."""

    grown_mb: float
    """What the process grew by, as the rollout got the weights."""
    apart: list[str]
    """Weights whose training parameter is not the memory of the slot."""
    answers: list[list[list[int]]]
    expected: list[list[list[int]]]
    """After each optimizer step: the rollout's greedy answers, and those of transformers with the trained weights."""
    released: Released
    fallen_mb: float
    """What the process fell by in that sleep."""


def resident_mb() -> float:
    gc.collect()
    trim_heap()
    return psutil.Process().memory_full_info().uss / MB


def train_and_generate(rank: int, directory: Path, is_bound: bool) -> Shared:
    """A rank program: two optimizer steps, with an answer of the rollout before, between and after them."""
    trained = language_engine(directory)
    engine = engine_on(rank, directory, ALONE, reads_weights=False, cache_mb=64)
    slots, before = engine.weight_slots(), resident_mb()
    if is_bound:
        assert trained.bind(slots) == set(slots)
    else:
        write_slots(engine, trained.weight_shards())
    grown = resident_mb() - before
    held = {shard.name: shard.tensor for shard in trained.weight_shards()}
    apart = [n for n, slot in slots.items() if (slot.tensor.data_ptr(), slot.tensor.shape) != _place(held[n])]
    plain = load_causal_lm(directory, dtype=torch.float32, device="cpu")
    answers, expected = [], []
    for version in range(3):
        engine.pause()
        engine.resume(version=version)
        answers.append(answered(engine, all_prompts()))
        plain.load_state_dict(weights(trained))
        expected.append(greedy_answers(plain, all_prompts(), tokens=TOKENS))
        stepped(trained, sequences(seed=version), likelihood_loss)
    engine.pause()
    engine.resume(version=3)
    last = answered(engine, all_prompts())
    answered(engine, prompt_rows([56] * 128))
    full = resident_mb()
    released = engine.sleep(kept=trained.weight_shards())
    fallen = full - resident_mb()
    engine.wake()
    if is_bound:
        assert answered(engine, all_prompts()) == last
    return Shared(grown, apart, answers, expected, released, fallen)


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


@pytest.fixture(scope="module")
def bound(toy_dir) -> Shared:
    return run_ranks(train_and_generate, 1, toy_dir("llama", **MODEL), True)[0]


@pytest.fixture(scope="module")
def copied(toy_dir) -> Shared:
    return run_ranks(train_and_generate, 1, toy_dir("llama", **MODEL), False)[0]


def test_bound_parameters_are_the_slots_and_an_optimizer_step_is_seen_without_a_transfer(bound):
    assert bound.apart == []
    assert bound.answers == bound.expected
    assert bound.answers[0] != bound.answers[1] != bound.answers[2]


@pytest.mark.slow
def test_copied_weights_answer_for_the_version_that_was_copied_alone(copied):
    assert len(copied.apart) == 4 * 9 + 3
    assert copied.answers[0] == copied.answers[1] == copied.expected[0] != copied.expected[1]


@pytest.mark.slow
def test_binding_saves_the_private_copy_of_the_weights(bound, copied):
    assert copied.grown_mb > WEIGHTS_MB
    assert bound.grown_mb < 3


def test_a_sleep_gives_back_the_cache_and_keeps_shared_weights(bound):
    assert bound.released.weight_bytes == bound.released.left_bytes == 0
    assert bound.released.kept_bytes > WEIGHTS_MB * MB
    assert bound.released.cache_bytes > 63 * MB
    assert CACHE_MB < bound.fallen_mb < WEIGHTS_MB


@pytest.mark.slow
def test_a_sleep_gives_back_weights_that_are_not_shared(copied):
    assert copied.released.kept_bytes == 0
    assert copied.released.weight_bytes > WEIGHTS_MB * MB
    assert copied.fallen_mb > CACHE_MB + WEIGHTS_MB
