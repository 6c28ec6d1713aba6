"""Every estimator except GAE and GRPO, against loops, and for any order of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.advantages.best_of_group import best_of_group
from hybridflow.algorithms.advantages.decoupled import decoupled
from hybridflow.algorithms.advantages.greedy_baseline import greedy_baseline
from hybridflow.algorithms.advantages.group_policy_gradient import group_policy_gradient
from hybridflow.algorithms.advantages.leave_one_out import leave_one_out
from hybridflow.algorithms.advantages.length_weighted import length_weighted
from hybridflow.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from hybridflow.algorithms.advantages.reinforce import reinforce
from hybridflow.algorithms.returns import rewards_to_go
from tests.oracles import advantages as oracle
from tests.unit.algorithms.examples import generator, itself, masks, normal, seeds, shapes, spoiled, token_mask


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """float32 against float64."""
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def groups(rows: int, seed: int) -> torch.Tensor:
    """Up to three groups, their rows anywhere, under numbers of 60 bits."""
    ids = torch.randint(-(2**60), 2**60, (3,), generator=generator(seed))
    return ids[torch.randint(0, 3, (rows,), generator=generator(seed + 1))]


def coins(rows: int, seed: int) -> torch.Tensor:
    """Scores of which many are equal."""
    return torch.randint(0, 2, (rows,), generator=generator(seed)).float()


def per_token(advantages: list[float], mask: torch.Tensor) -> torch.Tensor:
    return torch.tensor(advantages)[:, None] * mask


def test_decoupled_wants_a_weight_a_reward():
    with pytest.raises(ValueError, match=r"1 weights \[1\.0\] for 2 rewards"):
        decoupled(torch.zeros(4, 2), torch.ones(4, 2), torch.arange(4), weights=[1.0])


@given(shapes, masks, seeds, st.booleans())
def test_estimators_of_one_number_a_row_match_the_loops(shape, kind, seed, is_coin):
    rows = shape[0]
    scores, mask = coins(rows, seed) if is_coin else normal((rows,), seed), token_mask(shape, kind, seed)
    uids = groups(rows, seed)
    plain, ids = scores.tolist(), uids.tolist()
    pairs = [
        (leave_one_out(scores, mask, uids), oracle.leave_one_out(plain, ids)),
        (length_weighted(scores, mask, uids), oracle.length_weighted(plain, mask.tolist(), ids)),
        (
            4.0 * group_policy_gradient(scores, mask, uids, itself, divisor=4.0),
            oracle.group_policy_gradient(plain, ids),
        ),
        (best_of_group(scores, mask, uids), oracle.best_of_group(plain, ids, True, 1e-6)),
        (best_of_group(scores, mask, uids, divide_by_std=False), oracle.best_of_group(plain, ids, False, 1e-6)),
    ]
    for found, expected in pairs:
        assert_close(found, per_token(expected, mask))


@given(shapes, masks, seeds, st.sampled_from([0.0, 0.5, 1.0]))
def test_estimators_of_rewards_to_come_match_the_loops(shape, kind, seed, gamma):
    mask = token_mask(shape, kind, seed)
    rewards, baselines = spoiled(normal(shape, seed), mask), normal((shape[0],), seed + 1)
    to_go = torch.tensor(oracle.rewards_to_go(rewards.tolist(), mask.tolist(), gamma))
    assert_close(rewards_to_go(rewards, mask, gamma=gamma), to_go)
    assert_close(reinforce(rewards, mask, gamma=gamma), to_go)
    expected = oracle.greedy_baseline(rewards.nan_to_num().tolist(), baselines.tolist(), mask.tolist())
    assert_close(greedy_baseline(rewards, baselines, mask), torch.tensor(expected))


@given(shapes, masks, seeds, st.integers(1, 3))
def test_decoupled_matches_the_loops(shape, kind, seed, functions):
    rows = shape[0]
    components, mask, uids = normal((rows, functions), seed), token_mask(shape, kind, seed), groups(rows, seed)
    components[torch.rand(rows, functions, generator=generator(seed)) < 0.3] = torch.nan
    weights = [1.0, 0.5, -2.0][:functions] if seed % 2 else []
    plain = [[None if v != v else v for v in row] for row in components.tolist()]
    expected = oracle.decoupled(plain, uids.tolist(), weights or [1.0] * functions, 1e-6)
    found = decoupled(components, mask, uids, weights=weights)
    # pairs of close scores are divided by their small deviation
    assert_close(found, per_token(expected, mask), 1e-4)


@given(shapes, masks, seeds)
def test_the_optimal_token_baseline_matches_the_loops(shape, kind, seed):
    mask, uids = token_mask(shape, kind, seed), groups(shape[0], seed)
    rewards = spoiled(normal(shape, seed), mask)
    old = spoiled(-normal(shape, seed + 1).abs() - 0.1, mask)
    squares = spoiled(torch.rand(shape, generator=generator(seed)), mask)
    expected = oracle.optimal_token_baseline(
        rewards.tolist(), old.tolist(), squares.tolist(), mask.tolist(), uids.tolist(), 1e-8
    )
    found = optimal_token_baseline(rewards, old, squares, mask, uids)
    assert_close(found, torch.tensor(expected), 1e-4)


@given(seeds)
def test_group_policy_gradient_counts_over_all_parts_of_a_batch(seed):
    scores, mask, uids = coins(8, seed), torch.ones(8, 2), torch.arange(8) // 2
    whole = group_policy_gradient(scores, mask, uids, itself)
    parts = [slice(0, 2), slice(2, 8)]
    counts: list[torch.Tensor] = []
    for part in parts:
        group_policy_gradient(scores[part], mask[part], uids[part], lambda own: counts.append(own) or own)
    total = counts[0] + counts[1]
    found = [group_policy_gradient(scores[part], mask[part], uids[part], lambda _: total) for part in parts]
    torch.testing.assert_close(torch.cat(found), whole)
