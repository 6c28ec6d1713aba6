"""Rewards by functions."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hybridflow.batch import Batch
from hybridflow.batch.wire import Meta
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.controller.protocols import DATA_PARALLEL, answering_ranks
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.rewards.scorer import RewardScorer
from hybridflow.workers.failed_episodes import scored_without_failures


class RewardFunctionWorker(Worker):
    """Scores responses with reward functions, on the CPU."""

    def __init__(self, context: WorkerContext, *, reward: Reward, model: Model) -> None:
        super().__init__(context)
        self._answers = context.rank in answering_ranks(DATA_PARALLEL, context.mesh)
        self._scorer = RewardScorer(reward)
        if self._answers:
            self._scorer.start()
        self._tokenizer = load_tokenizer(tokenizer_directory(model), pad_token=model.pad_token)

    def close(self) -> None:
        """Ends the processes of the functions."""
        self._scorer.close()

    @transfer(DATA_PARALLEL, provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B], and a column `rewards/<function>` [B] for each function (NaN where it gave no score).

        `components` [B, F] stacks these columns in the order of the functions. `filter_scores` [B] are there if a
        function's dialect has them (see `RewardScorer`). Further metrics of the functions are in `meta`. Of ranks with
        the same rows, only the one that answers calls the functions, and not for failed episodes (see
        `scored_without_failures`).
        """
        if not self._answers:
            return Batch.of(rows={"scores": torch.zeros(len(batch))})
        return scored_without_failures(batch, self._scored)

    def _scored(self, batch: Batch) -> Batch:
        completions = decode_responses(self._tokenizer, batch.tokens("response_ids"))
        columns = {name: values for name, values in batch.objects.items() if name != "prompt"}
        with self.context.interruptible():
            scored = self._scorer.score(
                batch.object("prompt"), completions, columns, completion_ids=batch.tokens("response_ids").rows()
            )
        rows = {f"rewards/{name}": column for name, column in scored.columns.items()}
        rows["components"] = torch.stack(list(scored.columns.values()), 1)
        if scored.filter_scores is not None:
            rows["filter_scores"] = scored.filter_scores
        further: Meta = {
            name: measure.value for name, measure in scored.metrics.items() if name.removesuffix("/mean") not in rows
        }
        return Batch.of(rows={"scores": scored.scores} | rows, meta=further)


@dataclass(frozen=True)
class RewardFunctionRole:
    """The keyword arguments of reward functions; `model` is the policy, whose tokenizer decodes the responses."""

    worker_class: ClassVar[type[Worker]] = RewardFunctionWorker
    reward: Reward
    model: Model
