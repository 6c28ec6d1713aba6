"""The critic: values, advantages from them, and its own update."""

import pytest
import torch

from hybridflow.config.algorithm import KL, Algorithm, KLPlacement
from tests.toys import numbers_like, sequences
from tests.unit.workers.roles import critic


def scored(worker):
    batch = sequences().with_columns(rows={"scores": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5])})
    batch = batch.join(worker.values(batch))
    return batch.join(worker.advantages(batch))


def test_a_critic_learns_the_returns(toy_dir):
    worker = critic(toy_dir(), minibatch_sequences=5)
    losses = []
    for _ in range(6):
        metrics = worker.update(scored(worker))
        losses.append(metrics["critic/vf_loss"].value)
    assert losses[-1] < 0.7 * losses[0]


def test_metrics_have_the_names_that_dashboards_know(toy_dir):
    worker = critic(toy_dir())
    metrics = worker.update(scored(worker))
    expected = [f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vf_explained_var", "grad_norm", "lr")]
    expected += [f"critic/{name}/{part}" for name in ("returns", "values") for part in ("mean", "max", "min")]
    assert set(expected) <= metrics.keys()
    assert metrics["critic/vf_explained_var"].value == pytest.approx(0.0, abs=1e-6)  # a new critic's values are 0


def test_what_the_penalty_was_travels_with_the_update_that_follows(toy_dir):
    worker = critic(toy_dir(), algorithm=Algorithm(kl=KL(placement=KLPlacement.reward, coefficient=0.1)))
    batch = sequences().with_columns(rows={"scores": torch.ones(5)})
    ids = batch.tokens("response_ids")
    batch = batch.with_columns(
        tokens={n: numbers_like(ids, seed=i) for i, n in enumerate(("old_logprobs", "ref_logprobs"))}
    )
    batch = batch.join(worker.values(batch))
    batch = batch.join(worker.advantages(batch))
    metrics = worker.update(batch)
    assert metrics["actor/reward_kl_penalty_coeff"].value == 0.1
    assert "actor/reward_kl_penalty" in metrics
    assert "actor/reward_kl_penalty" not in worker.update(batch)


def test_a_restored_critic_goes_on_the_same(toy_dir, tmp_path):
    first, second = critic(toy_dir()), critic(toy_dir(seed=1))
    first.update(scored(first))
    first.save(tmp_path)
    second.load(tmp_path)
    for worker in (first, second):
        worker.update(scored(worker))
    values = [worker.values(sequences(seed=4)).tokens("values").values for worker in (first, second)]
    assert torch.equal(*values)
    assert (tmp_path / "critic" / "huggingface" / "config.json").is_file()
