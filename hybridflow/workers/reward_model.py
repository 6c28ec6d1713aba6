"""The reward model: a frozen model that judges responses, and the functions that judge beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.ragged import interleaved
from hybridflow.config.model import Model
from hybridflow.config.reward import LARGEST_SCORE, Reward
from hybridflow.config.training import Training
from hybridflow.controller.protocols import DATA_PARALLEL, answering_ranks
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.factory import make_value_engine, tokenizer_directory
from hybridflow.engines.training.interface import TrainEngine
from hybridflow.engines.training.traits import traits_of
from hybridflow.errors import RewardError
from hybridflow.models.classification import (
    Classifier,
    JudgingModel,
    describe_judge,
    longest_input,
    reads_same_tokens,
)
from hybridflow.models.loading import resolve_model_path, torch_dtype
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.rewards.interface import Failure
from hybridflow.workers.judging import values_after_tokens, values_at_end
from hybridflow.workers.model_worker import chosen_device
from hybridflow.workers.rereading import reread
from hybridflow.workers.reward_function import RewardFunctionWorker


@dataclass(frozen=True)
class Reading:
    """How a reward model is shown what a policy wrote."""

    judge: JudgingModel
    writer: PreTrainedTokenizerBase
    """The policy's tokenizer."""

    reader: PreTrainedTokenizerBase
    """The reward model's own."""

    shows_tokens: bool
    """The model is shown the policy's tokens, for they are its own; else the text."""


def reading_of(model: Model, policy: Model, *, key: str) -> Reading:
    """How the model will read the policy; raises `ConfigError` where it judges nothing. `key` is the setting.

    The tokenizers are compared, not their names: a model from elsewhere may well have the policy's.
    """
    directory = resolve_model_path(str(model.path), key=key)
    judge = describe_judge(directory, key=key, trust_remote_code=model.trust_remote_code)
    writer, reader = (load_tokenizer(tokenizer_directory(one), pad_token=one.pad_token) for one in (policy, model))
    return Reading(judge, writer, reader, judge.is_value_model and reads_same_tokens(writer, reader))


class RewardModelWorker(Worker):
    """Scores of responses by a model, and by functions; `policy` is the model whose tokens the responses are.

    The score of a response is what the model says once all of it is read: at its end-of-sequence, or where it broke
    off, at the last token that there is; of an empty response, at the prompt's last. A value model runs on a training
    engine; any other sequence-classification model whole on each device, as `transformers` has it.
    """

    def __init__(self, context: WorkerContext, *, reward: Reward, policy: Model, training: Training) -> None:
        super().__init__(context)
        traits_of(training.engine, context.mesh.size).set_environment()
        self._section = "reward" if context.role == "reward" else f"roles.{context.role}"
        self._label = "model" if context.role == "reward" else context.role
        self._reward = reward
        self._reading = reading_of(reward.model, policy, key=f"{self._section}.model.path")
        self._engine = self._make_engine(training) if self._reading.judge.is_value_model else None
        self._judge = partial(values_at_end, self._engine) if self._engine else self._make_classifier(training)
        does_answer = context.rank in answering_ranks(DATA_PARALLEL, context.mesh)
        wants_functions = bool(reward.functions) and does_answer
        self._functions = RewardFunctionWorker(context, reward=reward, model=policy) if wants_functions else None

    @transfer(DATA_PARALLEL, provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B]: `reward.model_weight` times the model's score, and the functions' weighted sum.

        `rewards/<label>` [B] are the scores of each function and of the model, `components` [B, F] all of them, with
        the model's last. A process reward gives `token_scores` too, times the weight; the model's score is their sum.

        Raises `RewardError` for a model's score that is not finite and for a sum beyond `LARGEST_SCORE`.
        """
        tokens, weight = {}, self._reward.model_weight
        if self._reward.process:
            judged_tokens = self._judged_tokens(batch)
            judged = judged_tokens.row_sums()
            tokens["token_scores"] = judged_tokens.like(weight * judged_tokens.values)
        else:
            judged = self._judge(self._sequences(batch))
            self._check_finite(judged, batch)
        functions = Batch.of(rows={"scores": torch.zeros(len(batch))})
        if self._functions is not None:
            functions = self._functions.score(batch)
        rows = {
            **functions.row_columns,
            f"rewards/{self._label}": judged,
            "scores": functions.row("scores") + weight * judged,
            "components": _beside(functions, judged),
        }
        if "filter_scores" in functions:
            rows["filter_scores"] = functions.row("filter_scores") + weight * judged
        for name in ("scores", "filter_scores"):
            if name in rows:
                self._check_bound(name, rows[name], batch)
        return Batch.of(rows=rows, tokens=tokens, meta=functions.meta)

    def _sequences(self, batch: Batch) -> Ragged:
        """What the model is shown of each row, in its own tokens."""
        reading = self._reading
        if reading.shows_tokens:
            return interleaved(batch.tokens("prompt_ids"), batch.tokens("response_ids"))
        is_decoder = reading.judge.is_decoder
        sequences = reread(batch, writer=reading.writer, reader=reading.reader, is_decoder=is_decoder)
        limit = longest_input(reading.judge, reading.reader)
        too_long = (sequences.lengths > limit).nonzero().flatten().tolist() if limit else []
        if too_long:
            found = int(sequences.lengths[too_long[0]])
            raise RewardError(
                self._sample_error(too_long[0], batch, f"it has {found} tokens, and the model reads {limit}."),
                remedy="Lower data.max_prompt_tokens or data.max_response_tokens, or take a model that reads more.",
            )
        return sequences

    def _judged_tokens(self, batch: Batch) -> Ragged:
        """The score of each token that the policy chose, and 0 for the others."""
        assert self._engine is not None and self._reading.shows_tokens, "checked before the run"
        scores = values_after_tokens(self._engine, batch)
        self._check_finite(scores.row_sums(), batch)
        return scores.like(scores.values * batch.tokens("response_mask").values)

    def _check_finite(self, scores: Tensor, batch: Batch) -> None:
        wrong = (~scores.isfinite()).nonzero().flatten().tolist()
        if wrong:
            raise RewardError(
                self._sample_error(wrong[0], batch, f"its score is {scores[wrong[0]].item()}.")
                + f"\nSamples without a finite score: {len(wrong)} of {len(batch)}.",
                remedy="Look at its weights, or try reward.model.dtype=float32.",
            )

    def _check_bound(self, name: str, sums: Tensor, batch: Batch) -> None:
        beyond = (~(sums.abs() <= LARGEST_SCORE)).nonzero().flatten().tolist()
        if beyond:
            found, bounds = sums[beyond[0]].item(), f"between {-LARGEST_SCORE:g} and {LARGEST_SCORE:g}"
            reason = f"the weighted sum of its {name} and the functions' is {found:g}, which is not {bounds}."
            raise RewardError(
                self._sample_error(beyond[0], batch, reason),
                remedy=f"Use smaller weights: {self._section}.model_weight, {self._section}.weights.",
            )

    def _sample_error(self, row: int, batch: Batch, reason: str) -> str:
        response = decode_responses(self._reading.writer, batch.tokens("response_ids").slice(row, row + 1))[0]
        name = str(self._reading.judge.directory)
        return f"The reward model {Failure(name, row, reason, batch.object('prompt')[row], response)}"

    def _make_engine(self, training: Training) -> TrainEngine:
        return make_value_engine(
            self._reward.model,
            training,
            total_optimizer_steps=0,
            device=chosen_device(self.context),
            ranks=self.context.ranks(),
        )

    def _make_classifier(self, training: Training) -> Callable[[Ragged], Tensor]:
        model = self._reward.model
        return Classifier(
            self._reading.judge,
            self._reading.reader,
            dtype=torch_dtype(model.dtype),
            device=chosen_device(self.context),
            microbatch_tokens=training.microbatch_tokens,
            trust_remote_code=model.trust_remote_code,
        )


def _beside(functions: Batch, judged: Tensor) -> Tensor:
    """The functions' scores [B, F] and the model's behind them."""
    known = functions.row("components") if "components" in functions else torch.empty(len(judged), 0)
    return torch.cat([known, judged[:, None]], 1)
