"""What an actor learns from preferences: the losses of plain loops, however rows are divided."""

import pytest
import torch

from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.config.training import Lora
from hybridflow.errors import BatchError, ConfigError
from hybridflow.observability.metrics import plain
from tests.oracles import preferences as oracle
from tests.preferences import PAIRS, labeled, log_ratios, pairs
from tests.unit.engines.training.engines import largest_difference, weights
from tests.unit.workers.roles import actor


def worker_of(directory, *, microbatch_tokens: int = 40, lora: Lora | None = None, **preference):
    training = {"minibatch_sequences": 2 * PAIRS, "microbatch_tokens": microbatch_tokens, "lora": lora or Lora()}
    return actor(directory, algorithm=Algorithm(preference=Preference(**preference)), **training)


def mean(values):
    return sum(values) / len(values)


def test_dpo_is_that_of_plain_loops(toy_dir):
    worker, batch = worker_of(toy_dir(), label_smoothing=0.1), pairs()
    found = log_ratios(worker, batch)
    chosen, rejected = found[::2], found[1::2]
    metrics = plain(worker.evaluate(batch))
    numbers = {"beta": 0.1, "label_smoothing": 0.1, "margin": 0.0}
    both = list(zip(chosen, rejected, strict=True))
    expected = {
        "train/loss": mean([oracle.dpo(*pair, **numbers) for pair in both]),
        "rewards/chosen": 0.1 * mean(chosen),
        "rewards/rejected": 0.1 * mean(rejected),
        "rewards/margins": 0.1 * mean([c - r for c, r in both]),
        "rewards/accuracies": mean([float(c > r) for c, r in both]),
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert plain(worker.preference_step(batch))["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-4)
    assert plain(worker.evaluate(batch))["train/loss"] < expected["train/loss"]


def test_kto_is_that_of_plain_loops(toy_dir):
    worker, batch = worker_of(toy_dir(), loss="kto", desirable_weight=1.4), labeled()
    found = log_ratios(worker, batch)
    labels = batch.row("is_chosen")[::2].tolist()
    expected = oracle.kto(found[::2], labels, found[1::2], beta=0.1, desirable=1.4, undesirable=1.0)
    metrics = plain(worker.evaluate(batch))
    assert metrics["train/loss"] == pytest.approx(mean(expected), rel=1e-4)
    assert metrics["train/kl"] == pytest.approx(max(0.0, mean(found[1::2])), rel=1e-4, abs=1e-5)
    liked = [ratio for ratio, label in zip(found[::2], labels, strict=True) if label]
    others = [ratio for ratio, label in zip(found[::2], labels, strict=True) if not label]
    assert metrics["rewards/margins"] == pytest.approx(0.1 * (mean(liked) - mean(others)), rel=1e-3)
    assert plain(worker.preference_step(batch))["train/loss"] == pytest.approx(mean(expected), rel=1e-4)


@pytest.mark.parametrize("label", [True, False])
def test_kto_learns_from_one_kind_of_label(toy_dir, label):
    worker, batch = worker_of(toy_dir(), loss="kto"), labeled((label,) * PAIRS)
    before = weights(worker.engine)
    metrics = plain(worker.preference_step(batch))
    assert ("rewards/chosen" in metrics, "rewards/rejected" in metrics) == (label, not label)
    assert "rewards/margins" not in metrics
    assert largest_difference(before, weights(worker.engine)) > 0


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "orpo", "simpo"])
@pytest.mark.parametrize("imitation", [0.0, 0.5])
def test_a_step_does_not_depend_on_microbatches(toy_dir, loss, imitation):
    found = []
    for budget in (16, 1000):
        worker = worker_of(toy_dir(), microbatch_tokens=budget, loss=loss, imitation=imitation)
        metrics = plain(worker.preference_step(pairs()))
        found.append((metrics, weights(worker.engine)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-5)
    assert largest_difference(found[0][1], found[1][1]) < 1e-5


def test_sums_known_before_are_as_good_as_log_probabilities(toy_dir):
    worker, batch = worker_of(toy_dir()), pairs()
    sums = batch.tokens("ref_logprobs").row_sums()
    known = batch.only([name for name in batch.columns if name != "ref_logprobs"]).with_columns(rows={"ref_sums": sums})
    assert plain(worker.evaluate(known)) == pytest.approx(plain(worker.evaluate(batch)), rel=1e-5)


def test_a_reference_that_is_missing_is_told(toy_dir):
    batch = pairs()
    bare = batch.only([name for name in batch.columns if name != "ref_logprobs"])
    with pytest.raises(BatchError, match="ref_logprobs"):
        worker_of(toy_dir()).preference_step(bare)
    for preference in ({"reference_free": True}, {"loss": "orpo"}, {"loss": "simpo"}):
        worker_of(toy_dir(), **preference).preference_step(bare)


def test_a_loss_of_ones_own(toy_dir, tmp_path):
    file = tmp_path / "losses.py"
    file.write_text(
        "def exponential(chosen_ratios, rejected_ratios, margins, beta, temper=1.0):\n"
        "    return (-beta * temper * (chosen_ratios - rejected_ratios) + margins).exp()\n"
        "def averaged(chosen_ratios):\n    return chosen_ratios.mean()\n"
        "def unknown(chosen_scores):\n    return chosen_scores\n"
    )
    batch = pairs()
    worker = worker_of(toy_dir(), loss=f"{file}:exponential")
    ratios = torch.tensor(log_ratios(worker, batch)).view(-1, 2)
    expected = (-0.1 * (ratios[:, 0] - ratios[:, 1]) + batch.row("margin")[::2]).exp().mean()
    assert plain(worker.evaluate(batch))["train/loss"] == pytest.approx(float(expected), rel=1e-4)
    preference = Preference(loss=f"{file}:exponential")
    worker = actor(toy_dir(), algorithm=Algorithm(preference=preference, loss_settings={"temper": 0.5}))
    expected = (-0.1 * 0.5 * (ratios[:, 0] - ratios[:, 1]) + batch.row("margin")[::2]).exp().mean()
    assert plain(worker.evaluate(batch))["train/loss"] == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(ConfigError, match="not one number for each of 6.*neither summed nor averaged"):
        worker_of(toy_dir(), loss=f"{file}:averaged").evaluate(batch)
    with pytest.raises(ConfigError, match="chosen_scores.*chosen_ratios"):
        worker_of(toy_dir(), loss=f"{file}:unknown").evaluate(batch)
