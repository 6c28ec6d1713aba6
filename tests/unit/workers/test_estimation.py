"""Advantages from scores, against loops; whatever the order of rows and their split over ranks."""

import pytest
import torch

from hybridflow.algorithms.catalogue import ADVANTAGES
from hybridflow.batch import Batch
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.errors import BatchError, ConfigError
from hybridflow.workers.estimation import AdvantageEstimation
from tests.oracles import advantages as oracle
from tests.oracles.reductions import whiten
from tests.toys import numbers_like, sequences
from tests.unit.algorithms.examples import itself
from tests.unit.algorithms.fake_ranks import on_ranks

GAE = Algorithm(advantage="gae", gamma=0.9, lam=0.8)
PLAIN_GAE = Algorithm(advantage="gae", gamma=0.9, lam=0.8, whiten_advantages=False)
DR_GRPO = Algorithm(advantage="dr_grpo")
PENALIZED = Algorithm(advantage="gae", whiten_advantages=False, kl=KL(placement=KLPlacement.reward, coefficient=0.3))


def scored(rows: int = 6) -> Batch:
    """Three prompts of two samples each, with all that an estimator reads."""
    batch = sequences([2] * rows, [5, 3, 1, 4, 6, 2][:rows])
    ids = batch.tokens("response_ids")
    components = torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.5, torch.nan], [2.0, 1.0], [-1.0, 2.0], [1.0, 0.0]])
    return batch.with_columns(
        rows={
            "scores": torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.0])[:rows],
            "components": components[:rows],
            "baselines": torch.tensor([0.5, 0.5, 1.0, 1.0, 0.0, 0.0])[:rows],
        },
        tokens={
            name: numbers_like(ids, seed=seed, scale=0.5)
            for seed, name in enumerate(("values", "old_logprobs", "ref_logprobs", "sum_pi_squared"))
        },
    )


def estimate(batch: Batch, algorithm: Algorithm) -> Batch:
    return AdvantageEstimation(algorithm, itself).estimate(batch)


def as_lists(batch: Batch, name: str) -> list[list[float]]:
    return batch.tokens(name).padded(0.0).double().tolist()


def score_rewards(batch: Batch) -> list[list[float]]:
    mask = as_lists(batch, "response_mask")
    return oracle.token_rewards(batch.row("scores").tolist(), mask, mask, 0.0)


def close(found: Batch, name: str, expected: list[list[float]]) -> bool:
    return torch.allclose(found.tokens(name).padded(0.0), torch.tensor(expected), atol=1e-5)


def test_gae_is_the_oracles():
    batch = scored()
    found = estimate(batch, PLAIN_GAE)
    mask, values = as_lists(batch, "response_mask"), as_lists(batch, "values")
    advantages, returns = oracle.gae(score_rewards(batch), values, mask, 0.9, 0.8)
    assert close(found, "rewards", score_rewards(batch))
    assert close(found, "advantages", advantages)
    assert close(found, "returns", returns)


def test_whitened_advantages_are_the_oracles_and_returns_are_not_whitened():
    batch = scored()
    found, plain = estimate(batch, GAE), estimate(batch, PLAIN_GAE)
    mask = batch.tokens("response_mask")
    expected = whiten(as_lists(plain, "advantages"), as_lists(batch, "response_mask"), 1e-8)
    kept = found.tokens("advantages").values[mask.values.bool()]
    assert torch.allclose(kept, torch.tensor(expected), atol=1e-5)
    assert torch.equal(found.tokens("returns").values, plain.tokens("returns").values)


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_a_penalty_in_the_reward_is_taken_from_every_token_and_counts_in_advantages(coefficient):
    algorithm = Algorithm(advantage="grpo", kl=KL(placement=KLPlacement.reward, coefficient=coefficient))
    batch = scored()
    mask = as_lists(batch, "response_mask")
    kl = (batch.tokens("old_logprobs").padded(0.0) - batch.tokens("ref_logprobs").padded(0.0)).tolist()
    rewards = oracle.token_rewards(batch.row("scores").tolist(), mask, kl, coefficient)
    found = estimate(batch, algorithm)
    assert close(found, "rewards", rewards)
    assert "returns" not in found
    expected = oracle.group_relative([sum(row) for row in rewards], batch.row("uid").tolist(), True, 1e-6)
    assert close(found, "advantages", [[a * m for m in row] for a, row in zip(expected, mask, strict=True)])


def test_a_penalty_without_a_reference_is_an_error_that_names_it():
    with pytest.raises(BatchError, match=r"algorithm\.kl\.placement=reward.*ref_logprobs"):
        estimate(scored().only(["uid", "response_mask", "scores", "values", "old_logprobs"]), PENALIZED)


def test_the_adaptive_coefficient_follows_the_divergence_and_is_reported_once():
    kl = KL(placement=KLPlacement.reward, coefficient=0.3, target=0.1, horizon=60)
    estimation = AdvantageEstimation(Algorithm(advantage="gae", kl=kl), itself)
    batch = scored()
    mask = batch.tokens("response_mask").values
    gaps = (batch.tokens("old_logprobs").values - batch.tokens("ref_logprobs").values) * mask
    a_token = float(gaps.sum() / mask.sum())
    estimation.estimate(batch)
    metrics = estimation.drain_metrics()
    assert metrics["actor/reward_kl_penalty"].value == pytest.approx(a_token, rel=1e-5)
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.3
    error = min(max(a_token / 0.1 - 1.0, -0.2), 0.2)
    assert estimation.kl_controller.coefficient == pytest.approx(0.3 * (1 + error * 6 / 60))
    assert estimation.drain_metrics() == {}


WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
EVERY = [pytest.param(Algorithm(advantage=name, gamma=0.9, lam=0.8), id=name) for name in ADVANTAGES]
EVERY.append(pytest.param(PENALIZED, id="penalized"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_says_a_number_a_token_and_whitens_where_its_paper_does(name):
    batch = scored()
    advantages = estimate(batch, Algorithm(advantage=name)).tokens("advantages").values
    mask = batch.tokens("response_mask").values.bool()
    assert advantages[mask].any()
    assert not advantages[~mask].any()
    is_white = abs(float(advantages[mask].mean())) < 1e-5 and abs(float(advantages[mask].std()) - 1.0) < 1e-3
    assert is_white == (name in WHITENED)


def test_whitening_can_be_asked_for_and_left_out():
    batch = scored()
    mask = batch.tokens("response_mask").values.bool()
    asked = estimate(batch, Algorithm(advantage="rloo", whiten_advantages=True)).tokens("advantages").values[mask]
    assert float(asked.std()) == pytest.approx(1.0, rel=1e-3)
    left_out = estimate(batch, Algorithm(advantage="reinforce_plus_plus_baseline", whiten_advantages=False))
    plain = estimate(batch, DR_GRPO)
    assert torch.equal(left_out.tokens("advantages").values, plain.tokens("advantages").values)


def test_components_reach_the_estimator_with_nan_for_what_was_not_scored():
    batch = scored()
    algorithm = Algorithm(advantage="gdpo", whiten_advantages=False, advantage_settings={"weights": [1.0, 0.5]})
    plain = [[None if v != v else v for v in row] for row in batch.row("components").tolist()]
    expected = oracle.decoupled(plain, batch.row("uid").tolist(), [1.0, 0.5], 1e-6)
    mask = as_lists(batch, "response_mask")
    wanted = [[a * m for m in row] for a, row in zip(expected, mask, strict=True)]
    assert close(estimate(batch, algorithm), "advantages", wanted)


def test_what_an_estimator_cannot_do_without_is_named():
    for name, column in (("remax", "baselines"), ("gdpo", "components"), ("optimal_token_baseline", "sum_pi_squared")):
        with pytest.raises(BatchError, match=f"'{name}' needs the columns .*'{column}'"):
            estimate(scored().only(["uid", "response_mask", "scores", "old_logprobs"]), Algorithm(advantage=name))


OWN = """
import torch

def careless(scores, mask):
    return torch.where(mask.bool(), scores[:, None], torch.nan).double()

def both(scores, mask):
    return scores[:, None] * mask, scores
"""


def test_returns_of_a_users_estimator_must_have_the_shape_of_the_mask(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=r"both \(its returns\) returned a value of shape \[6\]") as caught:
        estimate(scored(), Algorithm(advantage=f"{tmp_path}/own.py:both"))
    assert "Return a tensor [B, R] like the mask, here [6, 6]" in caught.value.remedy


def test_what_a_users_estimator_says_outside_the_mask_does_not_count(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    batch = scored()
    found = estimate(batch, Algorithm(advantage=f"{tmp_path}/own.py:careless")).tokens("advantages")
    assert found.values.dtype is torch.float32
    mask = as_lists(batch, "response_mask")
    expected = [[s * m for m in row] for s, row in zip(batch.row("scores").tolist(), mask, strict=True)]
    assert torch.allclose(found.padded(0.0), torch.tensor(expected))


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_split_over_ranks_does_not_matter(algorithm):
    batch = scored()
    parts = [batch.slice(0, 2), batch.slice(2, 6)]
    programs = [lambda reduce, part=part: AdvantageEstimation(algorithm, reduce).estimate(part) for part in parts]
    together = Batch.concat(on_ranks(programs))
    expected = estimate(batch, algorithm)
    for name in expected.columns:
        assert torch.allclose(together.tokens(name).values, expected.tokens(name).values, atol=1e-6), name


@pytest.mark.parametrize("algorithm", [GAE, PENALIZED], ids=["gae", "penalized"])
def test_scores_of_tokens_are_part_of_the_score_and_count_once(algorithm):
    batch = scored()
    mask = batch.tokens("response_mask")
    token_scores = numbers_like(mask, seed=9)
    process = mask.like(token_scores.values * mask.values)
    outcome = batch.row("scores")
    both = batch.with_columns(rows={"scores": outcome + process.row_sums()}, tokens={"token_scores": token_scores})
    found, plain = (estimate(given, algorithm).tokens("rewards") for given in (both, batch))
    assert torch.allclose(found.values, plain.values + process.values, atol=1e-5)
