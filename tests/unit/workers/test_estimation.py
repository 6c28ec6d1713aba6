"""Advantages from scores, against loops; whatever the order of rows and their split over ranks."""

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.catalogue import ADVANTAGES
from hybridflow.batch import Batch
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.errors import BatchError, ConfigError
from hybridflow.workers.estimation import AdvantageEstimation, Reduce
from tests.oracles import advantages as oracle
from tests.oracles.reductions import whiten
from tests.toys import numbers_like, sequences

GAE = Algorithm(advantage="gae", gamma=0.9, lam=0.8)
PLAIN_GAE = Algorithm(advantage="gae", gamma=0.9, lam=0.8, whiten_advantages=False)
GRPO = Algorithm(advantage="grpo")
DR_GRPO = Algorithm(advantage="dr_grpo")
PENALISED = Algorithm(advantage="gae", whiten_advantages=False, kl=KL(placement=KLPlacement.reward, coefficient=0.3))


def alone(tensor: Tensor) -> Tensor:
    return tensor


def answering(totals: list[Tensor]) -> Reduce:
    """Gives the sums over all ranks, in the order in which they are asked for."""
    queue = iter(totals)
    return lambda _: next(queue)


def judged(rows: int = 6) -> Batch:
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
    return AdvantageEstimation(algorithm, alone).estimate(batch)


def as_lists(batch: Batch, name: str) -> list[list[float]]:
    return batch.tokens(name).padded(0.0).double().tolist()


def score_rewards(batch: Batch) -> list[list[float]]:
    mask = as_lists(batch, "response_mask")
    return oracle.token_rewards(batch.row("scores").tolist(), mask, mask, 0.0)


def close(found: Batch, name: str, expected: list[list[float]]) -> bool:
    return torch.allclose(found.tokens(name).padded(0.0), torch.tensor(expected), atol=1e-5)


def test_gae_is_the_oracles():
    batch = judged()
    found = estimate(batch, PLAIN_GAE)
    mask, values = as_lists(batch, "response_mask"), as_lists(batch, "values")
    advantages, returns = oracle.gae(score_rewards(batch), values, mask, 0.9, 0.8)
    assert close(found, "rewards", score_rewards(batch))
    assert close(found, "advantages", advantages)
    assert close(found, "returns", returns)


def test_whitened_advantages_are_the_oracles_and_returns_are_not_whitened():
    batch = judged()
    found, plain = estimate(batch, GAE), estimate(batch, PLAIN_GAE)
    mask = batch.tokens("response_mask")
    expected = whiten(as_lists(plain, "advantages"), as_lists(batch, "response_mask"), 1e-8)
    kept = found.tokens("advantages").values[mask.values.bool()]
    assert torch.allclose(kept, torch.tensor(expected), atol=1e-5)
    assert torch.equal(found.tokens("returns").values, plain.tokens("returns").values)


@pytest.mark.parametrize(("algorithm", "divides"), [(GRPO, True), (DR_GRPO, False)])
def test_group_relative_advantages_are_the_oracles(algorithm, divides):
    batch = judged()
    found = estimate(batch, algorithm)
    expected = oracle.group_relative(batch.row("scores").tolist(), batch.row("uid").tolist(), divides, 1e-6)
    mask = as_lists(batch, "response_mask")
    assert close(found, "advantages", [[a * m for m in row] for a, row in zip(expected, mask, strict=True)])
    assert "returns" not in found


def test_a_penalty_in_the_reward_is_taken_from_every_token():
    batch = judged()
    mask = as_lists(batch, "response_mask")
    kl = (batch.tokens("old_logprobs").padded(0.0) - batch.tokens("ref_logprobs").padded(0.0)).tolist()
    expected = oracle.token_rewards(batch.row("scores").tolist(), mask, kl, 0.3)
    assert close(estimate(batch, PENALISED), "rewards", expected)


def test_the_penalty_counts_in_group_relative_advantages():
    algorithm = Algorithm(advantage="grpo", kl=KL(placement=KLPlacement.reward, coefficient=0.3))
    batch = judged()
    found = estimate(batch, algorithm)
    totals = found.tokens("rewards").row_sums().tolist()
    expected = oracle.group_relative(totals, batch.row("uid").tolist(), True, 1e-6)
    mask = as_lists(batch, "response_mask")
    assert close(found, "advantages", [[a * m for m in row] for a, row in zip(expected, mask, strict=True)])


def test_a_penalty_without_a_reference_is_an_error_that_names_it():
    with pytest.raises(BatchError, match=r"algorithm\.kl\.placement=reward.*ref_logprobs"):
        estimate(judged().only(["uid", "response_mask", "scores", "values", "old_logprobs"]), PENALISED)


def test_the_adaptive_coefficient_follows_the_divergence_and_is_reported_once():
    kl = KL(placement=KLPlacement.reward, coefficient=0.3, target=0.1, horizon=60)
    estimation = AdvantageEstimation(Algorithm(advantage="gae", kl=kl), alone)
    batch = judged()
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


def test_the_coefficient_survives_a_restart_bit_for_bit():
    kl = KL(placement=KLPlacement.reward, coefficient=0.3, target=0.1, horizon=60)
    first, second = (AdvantageEstimation(Algorithm(kl=kl), alone) for _ in range(2))
    first.estimate(judged())
    second.kl_controller.restore(first.kl_controller.state())
    assert second.kl_controller.coefficient == first.kl_controller.coefficient != 0.3


WHITENED = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
EVERY = [pytest.param(Algorithm(advantage=name, gamma=0.9, lam=0.8), id=name) for name in ADVANTAGES]
EVERY.append(pytest.param(PENALISED, id="penalised"))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_estimator_says_a_number_a_token_and_whitens_where_its_paper_does(name):
    batch = judged()
    advantages = estimate(batch, Algorithm(advantage=name)).tokens("advantages").values
    mask = batch.tokens("response_mask").values.bool()
    assert advantages[mask].any()
    assert not advantages[~mask].any()
    is_white = abs(float(advantages[mask].mean())) < 1e-5 and abs(float(advantages[mask].std()) - 1.0) < 1e-3
    assert is_white == (name in WHITENED)


def test_whitening_can_be_asked_for_and_left_out():
    batch = judged()
    mask = batch.tokens("response_mask").values.bool()
    asked = estimate(batch, Algorithm(advantage="rloo", whiten_advantages=True)).tokens("advantages").values[mask]
    assert float(asked.std()) == pytest.approx(1.0, rel=1e-3)
    left_out = estimate(batch, Algorithm(advantage="reinforce_plus_plus_baseline", whiten_advantages=False))
    plain = estimate(batch, DR_GRPO)
    assert torch.equal(left_out.tokens("advantages").values, plain.tokens("advantages").values)


def test_components_reach_the_estimator_with_nan_for_what_was_not_scored():
    batch = judged()
    algorithm = Algorithm(advantage="gdpo", whiten_advantages=False, advantage_settings={"weights": [1.0, 0.5]})
    plain = [[None if v != v else v for v in row] for row in batch.row("components").tolist()]
    expected = oracle.decoupled(plain, batch.row("uid").tolist(), [1.0, 0.5], 1e-6)
    mask = as_lists(batch, "response_mask")
    wanted = [[a * m for m in row] for a, row in zip(expected, mask, strict=True)]
    assert close(estimate(batch, algorithm), "advantages", wanted)


def test_what_an_estimator_cannot_do_without_is_named():
    for name, column in (("remax", "baselines"), ("gdpo", "components"), ("optimal_token_baseline", "sum_pi_squared")):
        with pytest.raises(BatchError, match=f"'{name}' needs the columns .*'{column}'"):
            estimate(judged().only(["uid", "response_mask", "scores", "old_logprobs"]), Algorithm(advantage=name))


OWN = """
import torch

def short(scores):
    return scores

def broken(scores, mask):
    return (scores[:, None] / 0.0) * mask

def careless(scores, mask):
    return torch.where(mask.bool(), scores[:, None], torch.nan).double()

def both(scores, mask):
    return scores[:, None] * mask, scores
"""


@pytest.mark.parametrize(
    ("name", "found", "remedy"),
    [
        ("short", r"short returned a value of shape \[6\]", "Return a tensor [B, R] like the mask, here [6, 6]"),
        ("broken", r"broken returned inf for token 0 of row 0", "divisions by 0"),
        ("both", r"both \(its returns\) returned a value of shape \[6\]", "like the mask"),
    ],
)
def test_a_users_estimator_that_answers_wrong_is_told(tmp_path, name, found, remedy):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(ConfigError, match=found) as caught:
        estimate(judged(), Algorithm(advantage=f"{tmp_path}/own.py:{name}"))
    assert remedy in caught.value.remedy


def test_what_a_users_estimator_says_outside_the_mask_does_not_count(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    batch = judged()
    found = estimate(batch, Algorithm(advantage=f"{tmp_path}/own.py:careless")).tokens("advantages")
    assert found.values.dtype is torch.float32
    mask = as_lists(batch, "response_mask")
    expected = [[s * m for m in row] for s, row in zip(batch.row("scores").tolist(), mask, strict=True)]
    assert torch.allclose(found.padded(0.0), torch.tensor(expected))


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_order_of_rows_does_not_matter(algorithm):
    batch = judged()
    order = torch.tensor([4, 0, 3, 5, 2, 1])
    found, moved = estimate(batch, algorithm), estimate(batch.select(order), algorithm)
    for name in found.columns:
        assert torch.allclose(found.tokens(name).select(order).values, moved.tokens(name).values, atol=1e-6), name


@pytest.mark.parametrize("algorithm", EVERY)
def test_the_split_over_ranks_does_not_matter(algorithm):
    batch = judged()
    parts = [batch.slice(0, 2), batch.slice(2, 6)]
    sums: list[list[Tensor]] = [[], []]
    for rank, part in enumerate(parts):
        AdvantageEstimation(algorithm, lambda tensor, rank=rank: sums[rank].append(tensor) or tensor).estimate(part)
    totals = [left + right for left, right in zip(*sums, strict=True)]
    together = Batch.concat([AdvantageEstimation(algorithm, answering(totals)).estimate(part) for part in parts])
    expected = estimate(batch, algorithm)
    for name in expected.columns:
        assert torch.allclose(together.tokens(name).values, expected.tokens(name).values, atol=1e-6), name


@pytest.mark.parametrize("algorithm", [GAE, PENALISED], ids=["gae", "penalised"])
def test_scores_of_tokens_are_part_of_the_score_and_count_once(algorithm):
    batch = judged()
    mask = batch.tokens("response_mask")
    token_scores = numbers_like(mask, seed=9)
    process = mask.like(token_scores.values * mask.values)
    outcome = batch.row("scores")
    both = batch.with_columns(rows={"scores": outcome + process.row_sums()}, tokens={"token_scores": token_scores})
    found, plain = (estimate(given, algorithm).tokens("rewards") for given in (both, batch))
    assert torch.allclose(found.values, plain.values + process.values, atol=1e-5)
