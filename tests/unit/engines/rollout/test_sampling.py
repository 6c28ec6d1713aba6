import math

import pytest
import torch

from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import draw, row_keys, uniform_draws, uniforms_at
from tests.oracles import sampling as oracle

UIDS = torch.tensor([0, 1, 7, 2**40])
SAMPLES = torch.tensor([0, 3, 0, 5])


@pytest.mark.parametrize("seed", [0, 17, 2**63 + 5, -1])
def test_draws_are_the_hash_of_seed_prompt_sample_and_position(seed):
    found = uniform_draws(row_keys(seed, UIDS, SAMPLES), 5)
    expected = [
        [oracle.uniform(seed % 2**64, uid, sample, position) for position in range(5)]
        for uid, sample in zip(UIDS.tolist(), SAMPLES.tolist(), strict=True)
    ]
    assert found.tolist() == expected


def test_numbers_at_single_positions_are_those_of_the_whole_sequence():
    keys, positions = row_keys(0, UIDS, SAMPLES), torch.tensor([3, 0, 7, 1])
    assert torch.equal(uniforms_at(keys, positions), uniform_draws(keys, 8).gather(1, positions[:, None])[:, 0])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(temperature=1.3, top_k=6, top_p=0.7),
        Sampling(top_p=1e-6),
        Sampling(top_k=100),
    ],
)
def test_tokens_and_logprobs_follow_the_restricted_distribution(sampling):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 2
    expected = torch.tensor(
        oracle.distribution(
            logits.tolist(), temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
    )
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, logprobs = draw(logits.expand(4000, 12), grid, sampling)
    # An even grid of uniform numbers hits each token in proportion to its probability, to one grid step.
    frequencies = torch.bincount(tokens, minlength=12) / 4000
    assert torch.allclose(frequencies, expected, atol=1.01 / 4000)
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-5)


def test_temperature_0_takes_the_most_probable_token_at_its_plain_probability():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    tokens, logprobs = draw(logits, torch.tensor([0.999, 0.999], dtype=torch.float64), Sampling(temperature=0.0))
    assert tokens.tolist() == [1, 0]
    assert torch.allclose(logprobs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-52])
def test_the_ends_of_the_interval_draw_possible_tokens(uniform):
    logits = torch.full((1, 50_000), -torch.inf)
    logits[0, [10, 20]] = torch.tensor([0.0, 1.0])
    tokens, logprobs = draw(logits, torch.tensor([uniform], dtype=torch.float64), Sampling())
    assert int(tokens) == (10 if uniform == 0 else 20)
    assert math.isfinite(float(logprobs))


def test_half_precision_logits_are_drawn_from_in_float32():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    uniforms = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    tokens, logprobs = draw(logits, uniforms, Sampling())
    same_tokens, same_logprobs = draw(logits.float(), uniforms, Sampling())
    assert tokens.tolist() == same_tokens.tolist()
    assert logprobs.dtype == torch.float32 and torch.equal(logprobs, same_logprobs)
