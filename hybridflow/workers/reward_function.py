"""The reward of functions: rules that read a response and say what it is worth."""

import torch

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.controller.protocols import DATA_PARALLEL
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.rewards.scorer import RewardScorer


class RewardFunctionWorker(Worker):
    """Scores of responses by functions, on the CPU."""

    def __init__(self, context: WorkerContext, *, reward: Reward, model: Model) -> None:
        super().__init__(context)
        self._scorer = RewardScorer(reward)
        self._scorer.start()
        self._tokenizer = load_tokenizer(tokenizer_directory(model), pad_token=model.pad_token)

    @transfer(DATA_PARALLEL, provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B], and one column `rewards/<function>` [B] a function (NaN where it did not score).

        `components` [B, F] are the same columns side by side, in the order of the functions.

        `filter_scores` [B], where a function answers in a dialect that has them (see `RewardScorer`).

        What functions reported beside their scores travels in `meta`, under its metric's name.
        """
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
        reported = {
            name: measure.value for name, measure in scored.metrics.items() if name.removesuffix("/mean") not in rows
        }
        return Batch.of(rows={"scores": scored.scores} | rows, meta=dict(reported))
