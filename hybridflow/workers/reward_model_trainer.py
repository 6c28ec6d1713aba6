"""The reward model in training: a value model that learns which of two responses people prefer.

Training engines give the value before each response token, and the model never reads a sequence's last token. To score
a whole sequence, a dummy response token is appended: the value before it is the score, and the model does not read it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.losses.ranking import accuracy, bradley_terry, centering
from hybridflow.batch import Batch, Ragged
from hybridflow.batch.ragged import interleaved
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.controller.protocols import DATA_PARALLEL, MINIBATCHES
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.factory import make_value_engine
from hybridflow.engines.training.interface import Loss, LossFn, TrainEngine
from hybridflow.observability.metrics import Metrics, mean, total
from hybridflow.workers.model_worker import ModelWorker, TrainedRole, TrainingSetup
from hybridflow.workers.objectives import measured

_PAIR = ("prompt_ids", "response_ids", "is_chosen", "margin")


class RewardModelTrainer(ModelWorker):
    """A value model whose value at the end of a response is its score.

    A pair is two rows, the chosen response and then the rejected one (see `dataflows/pairs.py`).
    """

    def __init__(self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm) -> None:
        super().__init__(context, setup)
        self._preference = algorithm.preference
        self.engine = self.started(make_value_engine)

    @transfer(MINIBATCHES, requires=("uid", *_PAIR))
    def preference_step(self, batch: Batch) -> Metrics:
        """Steps on pairs; metrics `train/loss`, `rewards/{chosen,rejected,margins,accuracies}`, `reward_model/*`."""

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            pairs = float(self.reduce(torch.tensor(len(minibatch) / 2).double()))
            tokens = _with_dummies(_sequences(minibatch))
            scored = Batch.of(rows=minibatch.row_columns, tokens=tokens, meta=minibatch.meta)
            return scored, ranking_objective(self._preference, num_pairs=pairs)

        return self.train(batch, objective, prefix="reward_model")

    @transfer(DATA_PARALLEL, requires=("uid", *_PAIR), changes=False)
    def evaluate(self, batch: Batch) -> Metrics:
        """The metrics of `preference_step` for pairs that are not learned, weighted by pairs."""
        loss, metrics = ranked(self._scores(batch), batch.row_columns, self._preference)
        return metrics | {"train/loss": mean(float(loss.mean()), len(loss))}

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B]: the model's current score of each response."""
        return Batch.of(rows={"scores": self._scores(batch)})

    def _scores(self, batch: Batch) -> Tensor:
        scores = values_at_end(self.engine, _sequences(batch))
        self.rest()
        return scores


class TrainedRewardModelRole(TrainedRole):
    """The keyword arguments of a reward model being trained."""

    worker_class = RewardModelTrainer


def ranking_objective(preference: Preference, *, num_pairs: float) -> LossFn:
    """The mean loss of the pairs of the optimizer step. Columns: `is_chosen`, `margin`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        loss, metrics = ranked(outputs["values"][:, 0], columns, preference)
        value = loss.sum() / num_pairs
        return Loss(value, metrics | {"train/loss": total(value.item())})

    return LossFn(("values",), loss_fn)


def ranked(scores: Tensor, columns: Mapping[str, Tensor], preference: Preference) -> tuple[Tensor, Metrics]:
    """The loss of each pair, and metrics of the scores of chosen and rejected responses."""
    is_chosen = columns["is_chosen"]
    chosen, rejected, margins = scores[is_chosen], scores[~is_chosen], columns["margin"][is_chosen]
    loss = bradley_terry(chosen, rejected, margins)
    if preference.center_coefficient:
        loss = loss + preference.center_coefficient * centering(chosen, rejected)
    means = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/margins": (chosen - rejected).mean(),
        "rewards/accuracies": accuracy(chosen, rejected),
    }
    return loss, measured(means, chosen.new_tensor(len(chosen)))


def values_at_end(engine: TrainEngine, sequences: Ragged) -> Tensor:
    """The value at the end of each sequence [B]; float32 on the CPU."""
    return _values(engine, Batch.of(tokens=_with_dummies(sequences))).values


def values_after_tokens(engine: TrainEngine, batch: Batch) -> Ragged:
    """The value after each response token, at the position of that token."""
    responses = batch.tokens("response_ids")
    longer = interleaved(responses, _dummies(len(responses)))
    asked = Batch.of(tokens={"prompt_ids": batch.tokens("prompt_ids"), "response_ids": longer})
    values = _values(engine, asked)
    after = torch.ones(len(values.values), dtype=torch.bool)
    after[values.offsets[:-1]] = False  # the value before the first token
    return responses.like(values.values[after])


def _values(engine: TrainEngine, batch: Batch) -> Ragged:
    """The values of a forward pass; the temperature has no effect, as a value model has no logits."""
    return engine.forward(batch, ("values",), temperature=1.0).tokens("values")


def _with_dummies(sequences: Ragged) -> dict[str, Ragged]:
    return {"prompt_ids": sequences, "response_ids": _dummies(len(sequences))}


def _dummies(rows: int) -> Ragged:
    return Ragged.from_lengths(torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))


def _sequences(batch: Batch) -> Ragged:
    return interleaved(batch.tokens("prompt_ids"), batch.tokens("response_ids"))
