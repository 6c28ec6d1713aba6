"""PPO-ptx: texts beside the samples of an update."""

import pytest
import torch

from hybridflow.config.algorithm import Algorithm
from hybridflow.config.training import Optimizer
from hybridflow.workers.objectives import Denominators
from hybridflow.workers.pretraining import with_texts
from tests.toys import numbers_like, sequences
from tests.unit.engines.training.engines import largest_difference, weights
from tests.unit.workers.roles import actor, sampled

STILL = Optimizer(learning_rate=0.0)
PLAIN = Optimizer(learning_rate=1e4, epsilon=1e4, max_grad_norm=0.0, weight_decay=0.0)
"""With an epsilon far above any gradient a first step of AdamW is the gradient times a constant."""


def texts(rows: int = 5, seed: int = 7):
    return sequences([3, 1, 7, 4, 2][:rows], [5, 9, 1, 4, 2][:rows], seed=seed)


def ptx(toy_dir, coefficient: float, **training):
    return actor(toy_dir(), algorithm=Algorithm(advantage="grpo", pretraining_coefficient=coefficient), **training)


def moved_by(worker, *given) -> dict[str, torch.Tensor]:
    """What one update changes of each weight."""
    before = {name: weight.clone() for name, weight in weights(worker.engine).items()}
    worker.update(*given)
    return {name: weight - before[name] for name, weight in weights(worker.engine).items()}


@pytest.mark.parametrize("coefficient", [0.5, 2.0])
def test_the_gradient_is_the_policys_and_that_of_the_texts(toy_dir, coefficient):
    both, policy, imitator = (ptx(toy_dir, coefficient, optimizer=PLAIN) for _ in range(3))
    batch = sampled(both)
    together, alone = moved_by(both, batch, texts()), moved_by(policy, batch)
    before = {name: weight.clone() for name, weight in weights(imitator.engine).items()}
    imitator.supervised_step(texts())
    for name, weight in weights(imitator.engine).items():
        expected = alone[name] + coefficient * (weight - before[name])
        assert torch.allclose(together[name], expected, atol=1e-3 * float(expected.abs().max()) + 1e-6), name
    assert max(float(change.abs().max()) for change in together.values()) > 0.0


def test_it_does_not_depend_on_micro_batches(toy_dir):
    wide, narrow = ptx(toy_dir, 1.0), ptx(toy_dir, 1.0, microbatch_tokens=10)
    batch = sampled(wide)
    found = [worker.update(batch, texts())["actor/pretraining_loss"].value for worker in (wide, narrow)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert largest_difference(weights(wide.engine), weights(narrow.engine)) < 1e-5


def test_what_is_said_of_the_policy_is_as_without_texts(toy_dir):
    with_them, without = ptx(toy_dir, 1.0, optimizer=STILL), ptx(toy_dir, 1.0, optimizer=STILL)
    batch, _ = sampled(with_them), sampled(without)
    given = with_them.logprobs(texts()).tokens("old_logprobs").values, texts().tokens("response_mask").values
    left, right = with_them.update(batch, texts()), without.update(batch)
    expected = -float((given[0] * given[1]).sum() / given[1].sum())
    assert left["actor/pretraining_loss"].value == pytest.approx(expected, rel=1e-5)
    assert set(left) - set(right) == {"actor/pretraining_loss"}
    for name in set(right) - {"actor/grad_norm"}:
        if "reshard" not in name:
            assert left[name].value == pytest.approx(right[name].value, abs=1e-6), name


def test_every_minibatch_has_its_share_of_the_texts(toy_dir):
    worker = ptx(toy_dir, 1.0)
    batch = with_texts(sampled(worker), texts(), [2, 2, 2])
    assert batch.meta["minibatch_rows"] == (4, 4, 3)
    samples = batch.tokens("response_mask").row_sums() > 0
    assert samples.tolist() == [True, True, False, False] * 2 + [True, True, False]
    assert torch.equal(batch.row("is_text"), ~samples)
    assert Denominators.of(batch).num_sequences == 6
    both = batch.tokens("response_mask").values * batch.tokens("pretraining_mask").values
    assert float(both.abs().sum()) == 0.0
    assert batch.tokens("pretraining_mask").values.sum() == texts().tokens("response_mask").values.sum()


def test_columns_of_one_kind_are_zero_in_the_other(toy_dir):
    worker = ptx(toy_dir, 1.0)
    batch = sampled(worker)
    batch = batch.with_columns(tokens={"ref_logprobs": numbers_like(batch.tokens("response_ids"), seed=1)})
    joined = with_texts(batch, texts(), [6])
    for name in ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs"):
        assert float(joined.tokens(name).slice(6, 11).values.abs().sum()) == 0.0
        assert torch.equal(joined.tokens(name).slice(0, 6).values, batch.tokens(name).values)
    assert torch.equal(joined.tokens("response_ids").slice(6, 11).values, texts().tokens("response_ids").values)
