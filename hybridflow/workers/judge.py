"""The judge: a reward model that learns which of two responses people prefer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.algorithms.losses.ranking import accuracy, bradley_terry, centering
from hybridflow.batch import Batch
from hybridflow.batch.ragged import interleaved
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.controller.protocols import DATA_PARALLEL, MINIBATCHES
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import WorkerContext
from hybridflow.engines.training.factory import make_value_engine
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.observability.metrics import Metrics, mean, total
from hybridflow.workers.judging import read_whole, values_at_end
from hybridflow.workers.model_worker import ModelWorker, TrainingSetup

_PAIR = ("prompt_ids", "response_ids", "is_chosen", "margin")


class JudgeWorker(ModelWorker):
    """A value model whose value of a whole response is its score.

    Pairs come as two rows, the chosen response and behind it the rejected one (see `dataflows/pairs.py`).
    """

    def __init__(self, context: WorkerContext, *, setup: TrainingSetup, algorithm: Algorithm) -> None:
        super().__init__(context, setup)
        self._preference = algorithm.preference
        self.engine = self.started(make_value_engine)

    @transfer(MINIBATCHES, requires=("uid", *_PAIR))
    def prefer(self, batch: Batch) -> Metrics:
        """Steps on pairs; metrics `train/loss`, `rewards/{chosen,rejected,margins,accuracies}`, `reward_model/*`."""

        def objective(minibatch: Batch) -> tuple[Batch, LossFn]:
            pairs = float(self.reduce(torch.tensor(len(minibatch) / 2).double()))
            return read_whole(minibatch), ranking_objective(self._preference, num_pairs=pairs)

        return self.train(batch, objective, prefix="reward_model")

    @transfer(DATA_PARALLEL, requires=("uid", *_PAIR), changes=False)
    def assess(self, batch: Batch) -> Metrics:
        """The same of pairs that teach nothing; of each rank its own, averaged by pairs."""
        loss, metrics = ranked(self._judged(batch), batch.row_columns, self._preference)
        return metrics | {"train/loss": mean(float(loss.mean()), len(loss))}

    @transfer(DATA_PARALLEL, requires=("prompt_ids", "response_ids"), provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B]: what the model, as it is, says of each response."""
        return Batch.of(rows={"scores": self._judged(batch)})

    def _judged(self, batch: Batch) -> Tensor:
        sequences = interleaved(batch.tokens("prompt_ids"), batch.tokens("response_ids"))
        scores = values_at_end(self.engine, sequences)
        self.rest()
        return scores


def ranking_objective(preference: Preference, *, num_pairs: float) -> LossFn:
    """The loss of pairs, averaged over all of the optimizer step's. Columns: `is_chosen`, `margin`."""

    def loss_fn(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        loss, metrics = ranked(outputs["values"][:, 0], columns, preference)
        value = loss.sum() / num_pairs
        return Loss(value, metrics | {"train/loss": total(value.item())})

    return LossFn(("values",), loss_fn)


def ranked(scores: Tensor, columns: Mapping[str, Tensor], preference: Preference) -> tuple[Tensor, Metrics]:
    """The loss of each pair, and how chosen and rejected responses score."""
    is_chosen = columns["is_chosen"]
    chosen, rejected, margins = scores[is_chosen], scores[~is_chosen], columns["margin"][is_chosen]
    loss = bradley_terry(chosen, rejected, margins)
    if preference.center_coefficient:
        loss = loss + preference.center_coefficient * centering(chosen, rejected)
    metrics = {
        "rewards/chosen": chosen.detach().mean(),
        "rewards/rejected": rejected.detach().mean(),
        "rewards/margins": (chosen - rejected).detach().mean(),
        "rewards/accuracies": accuracy(chosen, rejected),
    }
    numbers = torch.stack(list(metrics.values())).tolist()
    return loss, {name: mean(number, len(chosen)) for name, number in zip(metrics, numbers, strict=True)}
