"""Rows without a token that counts are left out of passes, and nothing else changes."""

import pytest
import torch

from hybridflow.algorithms.catalogue import POLICY_LOSSES
from hybridflow.batch import Batch
from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from hybridflow.engines.training.interface import LossFn
from hybridflow.observability.metrics import plain
from hybridflow.workers.masked_rows import rows_with_tokens
from hybridflow.workers.named_functions import policy_loss
from hybridflow.workers.objectives import (
    Denominators,
    policy_objective,
    prepared,
    supervised_objective,
    value_objective,
)
from hybridflow.workers.pretraining import with_pretraining, with_texts
from tests.toys import TEMPERATURE, numbers_like, sequences
from tests.unit.algorithms.examples import itself
from tests.unit.engines.training.engines import language_engine, largest_difference, value_engine, weights
from tests.unit.workers.roles import actor, critic

MASKED = (1, 4)
EXACT = 1e-6
"""float32 sums in another order; a masked row that counted would change a loss by a tenth."""


def samples(masked: tuple[int, ...] = MASKED) -> Batch:
    """Six rows with all columns that a loss reads; all tokens of some rows are masked."""
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=3)
    ids = batch.tokens("response_ids")
    mask = batch.tokens("response_mask").values.clone()
    for row in masked:
        mask[ids.offsets[row] : ids.offsets[row + 1]] = 0.0
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "rewards", "values", "returns")
    columns = {name: numbers_like(ids, seed=seed, scale=0.3) for seed, name in enumerate(names)}
    logprobs = {name: column.like(column.values - 4.0) for name, column in columns.items() if "logprobs" in name}
    scores = {"scores": torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 1.0])}
    return batch.with_columns(rows=scores, tokens={"response_mask": ids.like(mask)} | columns | logprobs)


def assert_same_step(make, batch: Batch, loss_fn: LossFn) -> None:
    """A step without the masked rows has the metrics of one with all rows, and leaves the same weights."""
    kept = rows_with_tokens(batch, loss_fn.masks)
    assert len(kept) < len(batch)
    first, second = make(), make()
    before = weights(first)
    found, expected = (
        plain(engine.train_step(rows, loss_fn, temperature=TEMPERATURE))
        for engine, rows in ((first, kept), (second, batch))
    )
    assert found == pytest.approx(expected, rel=1e-5, abs=EXACT)
    assert largest_difference(weights(first), weights(second)) < EXACT
    if bool(batch.tokens("response_mask").values.any()):
        assert largest_difference(weights(first), before) > 1e-4


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policys_step_is_that_of_all_rows(toy_dir, name, aggregation):
    kl = KL(placement=KLPlacement.loss, coefficient=0.5)
    algorithm = Algorithm(policy_loss=name, aggregation=aggregation, entropy_coefficient=0.1, kl=kl)
    batch = prepared(policy_loss(algorithm), samples(), itself)
    loss_fn = policy_objective(algorithm, Denominators.of(batch), norm_tokens=16)
    assert_same_step(lambda: language_engine(toy_dir(), microbatch_tokens=16), batch, loss_fn)


@pytest.mark.parametrize("masked", [MASKED, tuple(range(6))], ids=["some", "all"])
def test_steps_of_every_masked_loss_are_those_of_all_rows(toy_dir, masked):
    batch = samples(masked)
    denominators, algorithm = Denominators.of(batch), Algorithm()
    policy = policy_objective(algorithm, denominators, norm_tokens=16)
    for loss_fn in (policy, supervised_objective(denominators)):
        assert_same_step(lambda: language_engine(toy_dir()), batch, loss_fn)
    assert_same_step(lambda: value_engine(toy_dir()), batch, value_objective(algorithm, denominators))


def test_pretraining_texts_are_not_left_out(toy_dir):
    texts = sequences((2, 3), (4, 6), seed=8).only(["prompt_ids", "response_ids", "response_mask"])
    batch = with_texts(samples(), texts, [6])
    loss_fn = policy_objective(Algorithm(), Denominators.of(batch), norm_tokens=16)
    loss_fn = with_pretraining(loss_fn, batch, itself, coefficient=0.7)
    assert len(rows_with_tokens(batch, loss_fn.masks)) == 6 - len(MASKED) + len(texts)
    assert_same_step(lambda: language_engine(toy_dir()), batch, loss_fn)


def test_outputs_of_masked_rows_are_zeros_and_those_of_others_as_before(toy_dir):
    batch = samples()
    lengths = batch.tokens("response_ids").lengths
    is_masked = torch.zeros(6, dtype=torch.bool)
    is_masked[[*MASKED]] = True
    where = is_masked.repeat_interleave(lengths)
    worker, values = actor(toy_dir()), critic(toy_dir())
    values.update(samples(()))  # a new critic's values are 0
    for method, name in ((worker.logprobs, "old_logprobs"), (values.values, "values")):
        found = method(batch).tokens(name)
        expected = method(batch.only(["prompt_ids", "response_ids"])).tokens(name)
        assert torch.equal(found.offsets, expected.offsets)
        assert not found.values[where].any() and expected.values[where].any()
        assert torch.allclose(found.values[~where], expected.values[~where], atol=1e-5)
        nothing = method(samples(tuple(range(6)))).tokens(name)
        assert torch.equal(nothing.offsets, expected.offsets) and not nothing.values.any()


def test_a_worker_trains_only_on_rows_that_count(toy_dir):
    worker, seen = critic(toy_dir(), minibatch_sequences=3), []

    def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
        plain_loss = value_objective(Algorithm(), Denominators.of(minibatch))

        def watched(outputs, columns):
            seen.append(columns["response_mask"].any(1).tolist())
            return plain_loss(outputs, columns)

        return minibatch, LossFn(plain_loss.outputs, watched, plain_loss.masks)

    worker.train(samples(), objective, prefix="critic")
    assert seen == [[True, True], [True, True]]
