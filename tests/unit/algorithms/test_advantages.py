import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.group_relative import fraction_without_spread, group_relative, group_statistics
from tests.oracles import advantages as oracle
from tests.unit.algorithms.examples import generator, masks, normal, seeds, shapes, spoiled, token_mask

discounts = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(shapes, masks, seeds, discounts, discounts)
def test_gae_matches_the_loops(shape, kind, seed, gamma, lam):
    mask = token_mask(shape, kind, seed)
    rewards, values = spoiled(normal(shape, seed), mask), spoiled(normal(shape, seed + 1), mask)
    result = gae(rewards, values, mask, gamma=gamma, lam=lam)
    expected = oracle.gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    # float32 sums of at most nine deltas
    torch.testing.assert_close(result, tuple(map(torch.tensor, expected)), atol=1e-5, rtol=1e-5)


def test_gae_is_exact_enough_over_long_responses():
    shape = (2, 3000)
    mask = token_mask(shape, "holes", 0)
    rewards, values = normal(shape, 1, dtype=torch.float64), normal(shape, 2, dtype=torch.float64)
    result = gae(rewards, values, mask.double(), gamma=0.99, lam=0.95)
    expected = oracle.gae(rewards.tolist(), values.tolist(), mask.tolist(), 0.99, 0.95)
    torch.testing.assert_close(result, tuple(torch.tensor(rows, dtype=torch.float64) for rows in expected))


def test_gae_ignores_tokens_after_the_mask_ends():
    rewards, values, mask = normal((2, 6), 0), normal((2, 6), 1), torch.ones(2, 6)
    mask[:, 4:] = 0
    short = gae(rewards[:, :4], values[:, :4], mask[:, :4], gamma=0.9, lam=0.8)
    long = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    for before, after in zip(short, long, strict=True):
        assert torch.equal(before, after[:, :4])  # bit for bit: padding is no reason to differ
        assert not after[:, 4:].any()


@given(shapes, masks, seeds, st.booleans())
def test_group_relative_matches_the_loops(shape, kind, seed, divide_by_std):
    rows = shape[0]
    scores, mask = normal((rows,), seed), token_mask(shape, kind, seed)
    uids = torch.randint(-(2**60), 2**60, (3,), generator=generator(seed))[
        torch.randint(0, 3, (rows,), generator=generator(seed + 1))
    ]
    result = group_relative(scores, mask, uids, divide_by_std=divide_by_std)
    expected = torch.tensor(oracle.group_relative(scores.tolist(), uids.tolist(), divide_by_std, 1e-6))
    torch.testing.assert_close(result, expected[:, None] * mask, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", [0.1, 0.7, 1e3])
def test_equal_scores_have_no_advantage_and_no_spread(score):
    scores, uids = torch.full((7,), score), torch.zeros(7, dtype=torch.int64)
    advantages = group_relative(scores, torch.ones(7, 1), uids)
    assert advantages.abs().max() < 1e-6
    assert fraction_without_spread(scores, uids) == 1.0


def test_fraction_without_spread_counts_rows():
    scores, uids = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    assert fraction_without_spread(scores, uids) == 0.5
    assert group_statistics(scores, uids).size.tolist() == [2.0, 2.0, 2.0, 2.0]
