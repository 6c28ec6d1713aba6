"""Tokens that the policy did not sample change nothing: the same advantages and losses as without them."""

import pytest
import torch

from hybridflow.algorithms.catalogue import ADVANTAGES, POLICY_LOSSES
from hybridflow.batch import Batch, Ragged
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.observability.metrics import plain
from hybridflow.workers.estimation import AdvantageEstimation
from hybridflow.workers.named_functions import policy_loss
from hybridflow.workers.objectives import Denominators, columns_of, policy_objective, prepared, value_objective
from tests.toys import numbers_like, sequences
from tests.unit.algorithms.examples import itself

LENGTHS = [9, 4, 7, 6, 5, 8]
EXACT = 1e-6
"""float32: sums of at most 30 terms near 1, in another order."""


def conversations() -> Batch:
    """Three prompts of two samples each, with observations inside and at the beginning of responses."""
    batch = sequences([2] * 6, LENGTHS)
    ids = batch.tokens("response_ids")
    mask = torch.ones(len(ids.values))
    for row, observed in enumerate([(2, 3), (1,), (0, 1, 4), (3,), (), (1, 2, 5, 6)]):
        mask[ids.offsets[row] + torch.tensor(observed, dtype=torch.int64)] = 0.0
    columns = {
        name: numbers_like(ids, seed=seed, scale=0.5)
        for seed, name in enumerate(("values", "old_logprobs", "ref_logprobs", "sum_pi_squared", "rollout_logprobs"))
    }
    negative = {name: column.like(-column.values.abs()) for name, column in columns.items() if "logprobs" in name}
    return batch.with_columns(
        rows={
            "scores": torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.0]),
            "components": torch.tensor([[1.0, 5.0], [0.0, 5.0], [0.5, torch.nan], [2.0, 1.0], [-1.0, 2.0], [1.0, 0.0]]),
            "baselines": torch.tensor([0.5, 0.5, 1.0, 1.0, 0.0, 0.0]),
        },
        tokens={"response_mask": ids.like(mask)} | columns | negative,
    )


def sampled_only(batch: Batch) -> Batch:
    """The same rows without the tokens of observations."""
    kept = batch.tokens("response_mask").values.bool()
    lengths = batch.tokens("response_mask").row_sums().long()
    columns = {
        name: Ragged.from_lengths(column.values[kept], lengths)
        for name, column in batch.token_columns.items()
        if name != "prompt_ids"
    }
    return batch.with_columns(tokens=columns)


def of_sampled(batch: Batch, column: Ragged) -> torch.Tensor:
    return column.values[batch.tokens("response_mask").values.bool()]


@pytest.mark.parametrize("kl", [KLPlacement.loss, KLPlacement.reward])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_without_observations(name, kl):
    algorithm = Algorithm(advantage=name, gamma=0.9, lam=0.8, kl=KL(placement=kl, coefficient=0.2))
    if name == "gdpo":
        algorithm = Algorithm(advantage=name)  # it takes no penalty in the reward
    batch = conversations()
    found = AdvantageEstimation(algorithm, itself).estimate(batch)
    expected = AdvantageEstimation(algorithm, itself).estimate(sampled_only(batch))
    for column in expected.token_columns:
        values = of_sampled(batch, found.tokens(column))
        assert torch.allclose(values, expected.tokens(column).values, atol=EXACT), column
        outside = found.tokens(column).values[~batch.tokens("response_mask").values.bool()]
        assert not outside.any(), column


@pytest.mark.parametrize("kl", [KLPlacement.loss, KLPlacement.reward])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_estimator_reads_what_models_say_of_rows_without_a_sampled_token(name, kl):
    algorithm = Algorithm(advantage=name, gamma=0.9, lam=0.8, kl=KL(placement=kl, coefficient=0.2))
    if name == "gdpo":
        algorithm = Algorithm(advantage=name)
    batch = conversations()
    mask, lost = batch.tokens("response_mask"), torch.zeros(6, dtype=torch.bool)
    lost[[1, 4, 5]] = True
    is_lost = lost.repeat_interleave(mask.lengths)
    batch = batch.with_columns(tokens={"response_mask": mask.like(mask.values.masked_fill(is_lost, 0.0))})
    columns = {n: batch.tokens(n) for n in ("values", "old_logprobs", "ref_logprobs", "sum_pi_squared")}
    other = batch.with_columns(tokens={n: c.like(c.values.masked_fill(is_lost, 0.0)) for n, c in columns.items()})
    found, expected = (AdvantageEstimation(algorithm, itself).estimate(rows) for rows in (other, batch))
    for column in expected.token_columns:
        assert torch.equal(found.tokens(column).values, expected.tokens(column).values), column


def policy_step(batch: Batch, algorithm: Algorithm) -> tuple[float, torch.Tensor, dict[str, float]]:
    """The loss, its gradient with respect to the log-probabilities of sampled tokens, and metrics."""
    mask = batch.tokens("response_mask")
    minibatch = batch.with_columns(tokens={"advantages": batch.tokens("values")})
    minibatch = prepared(policy_loss(algorithm), minibatch, itself)
    loss_fn = policy_objective(algorithm, Denominators.of(minibatch, itself), norm_tokens=16)
    logprobs = batch.tokens("ref_logprobs").values.clone().requires_grad_()
    entropy = mask.like(-batch.tokens("ref_logprobs").values).padded(0)
    loss = loss_fn({"logprobs": mask.like(logprobs).padded(0), "entropy": entropy}, columns_of(minibatch))
    loss.value.backward()
    assert logprobs.grad is not None
    return float(loss.value.detach()), logprobs.grad, plain(loss.metrics)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_are_those_without_observations(name, aggregation):
    kl = KL(placement=KLPlacement.loss, coefficient=0.5)
    algorithm = Algorithm(policy_loss=name, aggregation=aggregation, entropy_coefficient=0.1, kl=kl)
    batch = conversations()
    value, slope, metrics = policy_step(batch, algorithm)
    expected, expected_slope, expected_metrics = policy_step(sampled_only(batch), algorithm)
    sampled = batch.tokens("response_mask").values.bool()
    assert value == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(slope[sampled], expected_slope, atol=EXACT)
    assert not slope[~sampled].any() and expected_slope.any()
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)


def test_the_critics_loss_is_that_without_observations():
    batch = conversations()
    found = {}
    for name, rows in (("all", batch), ("sampled", sampled_only(batch))):
        rows = rows.with_columns(tokens={"returns": rows.tokens("ref_logprobs")})
        loss_fn = value_objective(Algorithm(), Denominators.of(rows, itself))
        found[name] = float(loss_fn({"values": rows.tokens("old_logprobs").padded(0)}, columns_of(rows)).value)
    assert found["all"] == pytest.approx(found["sampled"], rel=1e-6)
