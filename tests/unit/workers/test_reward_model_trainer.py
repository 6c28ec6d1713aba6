"""A reward model in training: against plain loops over pairs, and against the model that it saves."""

import math
from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.training import Optimizer, Training
from hybridflow.controller.worker import WorkerContext
from hybridflow.models.heads import ValueModel, load_value_model
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer
from tests.oracles import ranking as oracle
from tests.preferences import PAIRS, pairs
from tests.reward_models import make_decoder
from tests.unit.workers.roles import setup_of

PLAIN = Optimizer(learning_rate=0.01, epsilon=1e-3, max_grad_norm=0.0)


def trainer(
    directory: Path, *, minibatch: int = PAIRS, role: str = "reward_model", preference=None, **training
) -> RewardModelTrainer:
    setup = setup_of(directory, minibatch_sequences=2 * minibatch, **({"optimizer": PLAIN} | training))
    algorithm = Algorithm(preference=preference or Preference())
    return RewardModelTrainer(WorkerContext(role), setup=setup, algorithm=algorithm)


def scores_by_hand(model: ValueModel, batch: Batch) -> list[torch.Tensor]:
    both = zip(batch.tokens("prompt_ids").rows(), batch.tokens("response_ids").rows(), strict=True)
    return [model(torch.cat(row)[None])[0, -1] for row in both]


@pytest.fixture(scope="module")
def scored(tmp_path_factory) -> Path:
    """A model whose scores differ from the first."""
    return make_decoder(tmp_path_factory.mktemp("reward_model"))


@pytest.mark.parametrize("microbatch_tokens", [1, 30, 1000])
def test_a_step_is_that_of_a_loop_over_pairs(scored, microbatch_tokens):
    preference, batch = Preference(center_coefficient=0.1), pairs()
    worker = trainer(scored, preference=preference, microbatch_tokens=microbatch_tokens)
    metrics = worker.preference_step(batch)

    plain = load_value_model(scored, dtype=torch.float32, device="cpu")
    values = scores_by_hand(plain, batch)
    rows = list(zip(values[::2], values[1::2], batch.row("margin")[::2].tolist(), strict=True))
    losses = [-torch.nn.functional.logsigmoid(c - r - m) + 0.1 * (c + r) ** 2 for c, r, m in rows]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in plain.parameters() if p.grad is not None))
    numbers = [(c.item(), r.item(), m) for c, r, m in rows]
    expected = [oracle.bradley_terry(c, r, m) + 0.1 * oracle.centering(c, r) for c, r, m in numbers]
    assert metrics["train/loss"].value == pytest.approx(sum(expected) / PAIRS, abs=1e-5)
    assert metrics["train/loss"].value == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["reward_model/grad_norm"].value == pytest.approx(norm, rel=1e-4)
    assert metrics["rewards/chosen"].value == pytest.approx(sum(c for c, _, _ in numbers) / PAIRS, abs=1e-5)
    assert metrics["rewards/rejected"].value == pytest.approx(sum(r for _, r, _ in numbers) / PAIRS, abs=1e-5)
    assert metrics["rewards/margins"].value == pytest.approx(sum(c - r for c, r, _ in numbers) / PAIRS, abs=1e-5)
    assert metrics["rewards/accuracies"].value == pytest.approx(oracle.accuracy([n[:2] for n in numbers]))


def test_a_new_head_begins_as_a_coin(toy_dir):
    worker = trainer(toy_dir())
    first = worker.preference_step(pairs(margins=(0.0,) * PAIRS))
    assert first["train/loss"].value == pytest.approx(math.log(2), abs=1e-6)
    assert first["rewards/accuracies"].value == 0.5
    last = [worker.preference_step(pairs(margins=(0.0,) * PAIRS)) for _ in range(10)][-1]
    assert last["train/loss"].value < 0.5
    assert last["rewards/accuracies"].value == 1.0


def test_evaluation_reports_what_a_step_would_and_teaches_nothing(scored):
    worker, batch = trainer(scored), pairs()
    before = worker.score(batch).row("scores")
    evaluated = worker.evaluate(batch)
    assert torch.equal(worker.score(batch).row("scores"), before)
    metrics = worker.preference_step(batch)
    assert set(evaluated) <= set(metrics)
    for name, measure in evaluated.items():
        assert measure.value == pytest.approx(metrics[name].value, abs=1e-5), name


def test_minibatches_count_pairs(toy_dir):
    worker = trainer(toy_dir(), minibatch=3)
    worker.preference_step(pairs())
    reference = trainer(toy_dir(), minibatch=3)
    for half in (pairs().slice(0, 6), pairs().slice(6, 12)):
        reference.preference_step(half)
    assert torch.equal(worker.score(pairs()).row("scores"), reference.score(pairs()).row("scores"))


def test_what_it_saves_scores_the_same_when_served(toy_dir, tmp_path):
    worker, batch = trainer(toy_dir()), pairs()
    for _ in range(3):
        worker.preference_step(batch)
    worker.save(tmp_path)
    expected = worker.score(batch).row("scores")
    path = str(tmp_path / "reward_model/huggingface")
    served = RewardModelWorker(
        WorkerContext("reward"),
        reward=Reward(model=Model(path=path)),
        policy=Model(path=str(toy_dir())),
        training=Training(),
    )
    assert torch.equal(served.score(batch).row("scores"), expected)

    again = trainer(toy_dir())
    again.load(tmp_path)
    assert torch.equal(again.score(batch).row("scores"), expected)
    assert again.preference_step(batch)["train/loss"].value == worker.preference_step(batch)["train/loss"].value
    assert torch.equal(again.score(batch).row("scores"), worker.score(batch).row("scores"))
