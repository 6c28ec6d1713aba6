"""The reward model: a frozen model that scores responses, optionally together with reward functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.ragged import interleaved
from hybridflow.config.model import Model
from hybridflow.config.reward import LARGEST_SCORE, Reward
from hybridflow.config.training import MICROBATCH_TOKENS, Training
from hybridflow.controller.protocols import DATA_PARALLEL, answering_ranks
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.data.chat_template import rendered
from hybridflow.data.tokenization import text_token_ids
from hybridflow.engines.training.factory import make_value_engine, tokenizer_directory
from hybridflow.engines.training.interface import Part, TrainEngine
from hybridflow.engines.traits import traits_of
from hybridflow.errors import RewardError
from hybridflow.models.classification import (
    Classifier,
    RewardModelDescription,
    describe_reward_model,
    longest_input,
    reads_same_tokens,
)
from hybridflow.models.loading import resolve_model_path, torch_dtype
from hybridflow.models.tokenizers import decode_responses, load_tokenizer
from hybridflow.rewards.interface import Failure
from hybridflow.workers.failed_episodes import scored_without_failures
from hybridflow.workers.model_worker import chosen_device, frozen_engine
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.reward_model_trainer import values_after_tokens, values_at_end

Message = Mapping[str, str]


@dataclass(frozen=True)
class RewardModelInput:
    """How a reward model reads the responses of a policy."""

    model: RewardModelDescription
    policy_tokenizer: PreTrainedTokenizerBase
    own_tokenizer: PreTrainedTokenizerBase
    takes_tokens: bool
    """The model reads the policy's tokens, because both tokenizers are equal; otherwise it reads text."""


def reward_model_input(model: Model, policy: Model, *, key: str) -> RewardModelInput:
    """How the model at `key` will read the policy; raises `ConfigError` if it is not a reward model.

    The tokenizers themselves are compared: models with different names may share one.
    """
    directory = resolve_model_path(str(model.path), key=key)
    description = describe_reward_model(directory, key=key, trust_remote_code=model.trust_remote_code)
    writer, reader = (load_tokenizer(tokenizer_directory(one), pad_token=one.pad_token) for one in (policy, model))
    takes_tokens = description.is_value_model and reads_same_tokens(writer, reader)
    return RewardModelInput(description, writer, reader, takes_tokens)


class RewardModelWorker(Worker):
    """Scores responses with a reward model and optional reward functions; `policy` defines the responses' tokenizer.

    The score is the model's output at the end of the response: at its end-of-sequence token or, if it was truncated,
    its last token; at the prompt's last token for an empty response. A value model runs on a training engine; any other
    sequence-classification model runs unsharded on each device, in `transformers`.
    """

    def __init__(self, context: WorkerContext, *, reward: Reward, policy: Model, training: Training) -> None:
        super().__init__(context)
        traits_of(training.engine, context.mesh.size).set_environment()
        self._section = "reward" if context.role == "reward" else f"roles.{context.role}"
        self._label = "model" if context.role == "reward" else context.role
        self._reward = reward
        self._input = reward_model_input(reward.model, policy, key=f"{self._section}.model.path")
        self._engine: TrainEngine | None = None
        if self._input.model.is_value_model:
            self._engine = frozen_engine(make_value_engine, reward.model, training, context)
        self._model = partial(values_at_end, self._engine) if self._engine else self._make_classifier(training)
        self._is_offloaded = training.offload_parameters
        does_answer = context.rank in answering_ranks(DATA_PARALLEL, context.mesh)
        wants_functions = bool(reward.functions) and does_answer
        self._functions = RewardFunctionWorker(context, reward=reward, model=policy) if wants_functions else None

    def close(self) -> None:
        """Ends the processes of the functions."""
        if self._functions is not None:
            self._functions.close()

    @transfer(DATA_PARALLEL, provides=("scores",), changes=False)
    def score(self, batch: Batch) -> Batch:
        """`scores` [B]: `reward.model_weight` times the model's score, plus the functions' weighted sum.

        `rewards/<label>` [B] are the scores of each function and of the model; `components` [B, F] stacks them, the
        model's last. A process reward model also gives `token_scores`, times the weight, and its score is their sum.
        Failed episodes are not scored (see `scored_without_failures`).

        Raises `RewardError` if the model's score is not finite, or a sum is beyond `LARGEST_SCORE`.
        """
        return scored_without_failures(batch, self._scored)

    def _scored(self, batch: Batch) -> Batch:
        tokens, weight = {}, self._reward.model_weight
        if self._reward.process:
            per_token = self._token_scores(batch)
            scored = per_token.row_sums()
            tokens["token_scores"] = per_token.like(weight * per_token.values)
        else:
            scored = self._model(self._sequences(batch))
            self._check_finite(scored, batch)
        if self._engine is not None and self._is_offloaded:
            self._engine.offload(Part.parameters)
        functions = Batch.of(rows={"scores": torch.zeros(len(batch))})
        if self._functions is not None:
            functions = self._functions.score(batch)
        rows = {
            **functions.row_columns,
            f"rewards/{self._label}": scored,
            "scores": functions.row("scores") + weight * scored,
        }
        others = functions.row("components") if "components" in functions else torch.empty(len(scored), 0)
        rows["components"] = torch.cat([others, scored[:, None]], 1)
        if "filter_scores" in functions:
            rows["filter_scores"] = functions.row("filter_scores") + weight * scored
        for name in ("scores", "filter_scores"):
            if name in rows:
                self._check_bound(name, rows[name], batch)
        return Batch.of(rows=rows, tokens=tokens, meta=functions.meta)

    def _sequences(self, batch: Batch) -> Ragged:
        """The model's input for each row, in its own tokens."""
        source = self._input
        if source.takes_tokens:
            return interleaved(batch.tokens("prompt_ids"), batch.tokens("response_ids"))
        sequences = retokenized(
            batch, writer=source.policy_tokenizer, reader=source.own_tokenizer, is_decoder=source.model.is_decoder
        )
        limit = longest_input(source.model, source.own_tokenizer)
        too_long = (sequences.lengths > limit).nonzero().flatten().tolist() if limit else []
        if too_long:
            found = int(sequences.lengths[too_long[0]])
            raise RewardError(
                self._sample_error(too_long[0], batch, f"it has {found} tokens, but the model reads at most {limit}."),
                remedy="Lower data.max_prompt_tokens or data.max_response_tokens, or use a model that reads more.",
            )
        return sequences

    def _token_scores(self, batch: Batch) -> Ragged:
        """The score of each token that the policy sampled, and 0 for the others."""
        assert self._engine is not None and self._input.takes_tokens, "checked before the run"
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
        response = decode_responses(self._input.policy_tokenizer, batch.tokens("response_ids").slice(row, row + 1))[0]
        name = str(self._input.model.directory)
        return f"The reward model {Failure(name, row, reason, batch.object('prompt')[row], response)}"

    def _make_classifier(self, training: Training) -> Callable[[Ragged], Tensor]:
        model = self._reward.model
        return Classifier(
            self._input.model,
            self._input.own_tokenizer,
            dtype=torch_dtype(model.dtype),
            device=chosen_device(self.context),
            microbatch_tokens=training.microbatch_tokens or MICROBATCH_TOKENS[chosen_device(self.context).type],
            trust_remote_code=model.trust_remote_code,
        )


@dataclass(frozen=True)
class RewardModelRole:
    """The keyword arguments of a frozen reward model, optionally with reward functions."""

    worker_class: ClassVar[type[Worker]] = RewardModelWorker
    reward: Reward
    policy: Model
    training: Training


def retokenized(
    batch: Batch, *, writer: PreTrainedTokenizerBase, reader: PreTrainedTokenizerBase, is_decoder: bool
) -> Ragged:
    """Prompts and responses as one sequence per row, decoded by the writer's tokenizer and encoded by the reader's.

    Conversations use the reader's chat template, which also closes truncated replies; without a template their turns
    are joined by newlines. Text gets the reader's special tokens; for a decoder, exactly the responses that were not
    truncated end with an end-of-sequence token.
    """
    responses = decode_responses(writer, batch.tokens("response_ids"))
    truncated = batch.row("truncated").tolist() if "truncated" in batch else [False] * len(batch)
    rows = [
        _ids(prompt, response, reader, is_decoder=is_decoder, is_truncated=cut)
        for prompt, response, cut in zip(batch.object("prompt"), responses, truncated, strict=True)
    ]
    return Ragged.from_rows(rows, torch.int64)


def _ids(
    prompt: str | list[Message],
    response: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_decoder: bool,
    is_truncated: bool,
) -> list[int]:
    if not isinstance(prompt, str) and tokenizer.chat_template is not None:
        text = rendered(_answered(prompt, response), tokenizer)
        return text_token_ids([text], tokenizer, add_special_tokens=False)[0]
    turns = (
        [prompt + response] if isinstance(prompt, str) else [turn["content"] for turn in _answered(prompt, response)]
    )
    text = "\n".join(turns)
    if not is_decoder:
        found: list[int] = tokenizer(text, verbose=False)["input_ids"]
        return found
    ids = text_token_ids([text], tokenizer, add_special_tokens=True)[0]
    eos = tokenizer.eos_token_id
    return [*ids, eos] if isinstance(eos, int) and not is_truncated else ids


def _answered(prompt: list[Message], response: str) -> list[dict[str, str]]:
    """The conversation with the reply, which continues the prompt's last turn if that is the assistant's."""
    turns = [dict(turn) for turn in prompt]
    if turns[-1]["role"] == "assistant":
        return [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + response}]
    return [*turns, {"role": "assistant", "content": response}]
