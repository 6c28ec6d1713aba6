"""What is particular to vLLM inside a training process."""

import pytest
import torch

from hybridflow.config.model import Model
from hybridflow.config.rollout import Rollout, RolloutKind, Sampling, Vllm
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.errors import EngineError
from tests.parity.test_rollout_parity import LONGEST, TOLERANCE, Pair, other_weights, pair_of
from tests.unit.engines.rollout.rows import prompt_rows, responses

pytestmark = pytest.mark.vllm
PROMPTS = prompt_rows((LONGEST,))


def agrees(pair: Pair) -> bool:
    return pair.largest_difference(pair.generate(PROMPTS, Sampling(ignore_eos=True))) < TOLERANCE


@pytest.mark.parametrize("architecture", ["qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_biases_norms_and_a_tied_head_follow_their_weights(toy_dir, architecture):
    """Another architecture costs vLLM 10 seconds on a machine that has not seen it."""
    pair = pair_of(RolloutKind.vllm, toy_dir(architecture, tie_word_embeddings=True, max_position_embeddings=256))
    assert agrees(pair)
    with other_weights(pair, seed=2):
        pair.rollout.pause()
        pair.rollout.resume(version=1)
        assert agrees(pair)


def test_a_vocabulary_that_is_padded_inside(toy_dir):
    pair = pair_of(RolloutKind.vllm, toy_dir("llama", vocab_size=70, max_position_embeddings=256))
    assert pair.rollout.weight_slots()["lm_head.weight"].tensor.shape == (70, 64)
    assert agrees(pair)


def test_the_cache_of_earlier_weights_is_used_until_they_are_said_to_have_changed(toy_dir):
    """Were it not, no test would notice an engine that forgets to clear it."""
    pair = pair_of(RolloutKind.vllm, toy_dir("llama", max_position_embeddings=256))
    assert agrees(pair)
    with other_weights(pair, seed=3):
        assert not agrees(pair)
        pair.rollout.pause()
        pair.rollout.resume(version=1)
        assert agrees(pair)


def test_a_cache_that_does_not_hold_one_sequence_names_its_setting(toy_dir):
    rollout = Rollout(engine=RolloutKind.vllm, vllm=Vllm(kv_cache_mb=1))
    with pytest.raises(EngineError, match=r"KV cache.*rollout\.vllm\.kv_cache_mb"):
        make_rollout_engine(
            Model(path=str(toy_dir("llama", max_position_embeddings=8192))),
            rollout,
            limit_tokens=8192,
            eos_token_ids=(1,),
            device=torch.device("cpu"),
        )


def test_the_random_state_survives_its_start(toy_dir):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pair_of(RolloutKind.vllm, toy_dir("llama", max_position_embeddings=256))
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_that_are_not_finite_are_refused_in_words(toy_dir):
    pair = pair_of(RolloutKind.vllm, toy_dir("llama", max_position_embeddings=256))
    head = pair.rollout.weight_slots()["lm_head.weight"].tensor
    kept = head[3].clone()
    head[3] = float("nan")
    pair.rollout.pause()
    pair.rollout.resume(version=7)
    with pytest.raises(EngineError, match=r"logits are NaN or infinite in .* \(weights of step 7\)") as caught:
        pair.generate(PROMPTS, Sampling(ignore_eos=True))
    assert "actor.optimizer.learning_rate" in caught.value.remedy
    head[3] = kept
    pair.rollout.pause()
    pair.rollout.resume(version=8)
    assert agrees(pair)


@pytest.mark.parametrize(
    "sampling", [Sampling(ignore_eos=True), Sampling(temperature=0.7, top_k=9, top_p=0.8, ignore_eos=True)], ids=str
)
def test_both_engines_draw_the_same_tokens_and_no_generator_does(toy_dir, sampling, monkeypatch):
    directory = toy_dir("llama", max_position_embeddings=256)
    own, other = pair_of(RolloutKind.vllm, directory), pair_of(RolloutKind.transformers, directory)
    prompts = prompt_rows((5, 90, 2, 40, 7), samples=8)
    expected = responses(other.generate(prompts, sampling))
    monkeypatch.setattr(torch, "Generator", None)  # one per request would be drawn from row by row
    found = responses(own.generate(prompts, sampling))
    # Sums in another order move probabilities by 1e-6: of 640 draws, hardly one falls to another token.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(found) - 1


def test_a_prompt_that_is_read_in_two_steps_draws_what_it_draws_alone(toy_dir):
    """vLLM reads at most 4,096 tokens of prompts per step on a CPU, and cuts a prompt there."""
    pair = pair_of(RolloutKind.vllm, toy_dir("llama", max_position_embeddings=256))
    prompts = prompt_rows([LONGEST] * 25, seed=4)
    whole = responses(pair.generate(prompts, Sampling(ignore_eos=True)))
    parts = [responses(pair.generate(part, Sampling(ignore_eos=True))) for part in prompts.split([12, 13])]
    assert [answer for part in parts for answer in part] == whole
