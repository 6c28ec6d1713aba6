"""Shared by all rollout engines: the states of `RolloutEngine`, checks of prompts, and the columns of `generate`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from jaxtyping import Int64
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.wire import Meta
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released, WeightBuffer
from hybridflow.engines.rollout.sampling import row_keys
from hybridflow.errors import BatchError, EngineError, NumericError, StaleWeightsError
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class RolloutShell(ABC):
    """The part of a `RolloutEngine` that does not depend on the engine; each engine inherits from it.

    `buffer` holds the weights, if there are any, and `slots` are views of it. Prompts and responses have at most
    `limit_tokens` together.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        buffer: WeightBuffer | None,
        slots: Mapping[str, WeightShard],
        *,
        limit_tokens: int,
        has_weights: bool = True,
    ) -> None:
        self.mesh = mesh
        self.version = 0
        self.is_asleep = False
        self._buffer = buffer
        self._slots = slots
        self._limit_tokens = limit_tokens
        self._missing = None if has_weights else "have not been written yet"
        """Completes "The rollout's weights ..." while they are incomplete."""

    @abstractmethod
    def _sampled(
        self, prompts: Ragged, keys: Int64[Tensor, " B"], sampling: Sampling, max_response_tokens: int
    ) -> tuple[Ragged, Ragged, Tensor]:
        """A response to each prompt: tokens, log-probabilities, and whether the length limit was reached [B]."""

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        if self.is_asleep:
            raise EngineError("The rollout engine is asleep.", remedy="Call wake() before generate().")
        if self._missing is not None:
            raise StaleWeightsError(
                f"The rollout's weights {self._missing}.",
                remedy="Publish the weights (write every slot, then weights_changed) before the next generate.",
            )
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        keys = row_keys(seed, prompts.row("uid"), prompts.row("sample_index"))
        tokens, logprobs, truncated = self._sampled(ids, keys, sampling, max_response_tokens)
        return response_batch(tokens, logprobs, truncated, version=self.version, sampling=sampling)

    def weight_slots(self) -> Mapping[str, WeightShard]:
        return self._slots

    def weights_changing(self) -> None:
        self._missing = "are being written, or a transfer that wrote them failed"

    def weights_changed(self, *, version: int) -> None:
        self._missing = None
        self.version = version

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`. On a GPU all weights stay."""
        released = Released(0, 0, 0) if self._buffer is None else self._buffer.release(shard.tensor for shard in kept)
        if released.weight_bytes:
            self._missing = "were freed while it slept"
        self.is_asleep = True
        return released

    def wake(self) -> None:
        """See `RolloutEngine.wake`. On a CPU, pages return as they are written."""
        self.is_asleep = False


def ends_of(sampling: Sampling, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a response."""
    return (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)


def checked_prompts(prompts: Batch, *, max_response_tokens: int, limit_tokens: int) -> Ragged:
    """The prompts' tokens; raises if a column is missing, a prompt is empty, or the limit is exceeded."""
    prompts.require(("prompt_ids", "uid", "sample_index"), stage="rollout.generate")
    ids = prompts.tokens("prompt_ids")
    if not len(ids):
        return ids
    lengths = ids.lengths
    if int(lengths.min()) == 0:
        raise BatchError(
            f"The prompt with uid {int(prompts.row('uid')[lengths.argmin()])} has no tokens.",
            remedy="Give every prompt at least one token; a beginning-of-sequence token will do.",
        )
    longest = int(lengths.max())
    if longest + max_response_tokens > limit_tokens:
        raise EngineError(
            f"A prompt of {longest} tokens and a response of {max_response_tokens} make"
            f" {longest + max_response_tokens} tokens; the rollout engine's limit is {limit_tokens}.",
            remedy="Lower data.max_prompt_tokens or data.max_response_tokens, or use a model with a longer context.",
        )
    return ids


def response_batch(ids: Ragged, logprobs: Ragged, truncated: Tensor, *, version: int, sampling: Sampling) -> Batch:
    """The columns that `generate` adds.

    `response_ids` [B, (R)], including the token that ended it (an end of sequence, one of `stop_token_ids`, or the one
    that completed a stop string); `response_mask` of ones; `rollout_logprobs`; `weight_version` [B]; `truncated` [B]
    (the length limit was reached before any of these). Metadata: the temperature of the log-probabilities, and
    `is_restricted` if top_p or top_k renormalized them. Raises `NumericError` if a log-probability is not finite,
    because the model's logits are then not finite either.
    """
    if not bool(logprobs.values.isfinite().all()):
        num_bad = sum(not bool(row.isfinite().all()) for row in logprobs.rows())
        raise NumericError(
            f"The model's logits are NaN or infinite in {num_bad} of {len(logprobs)} responses"
            f" (weights of step {version}).",
            remedy="If the weights diverged in training, lower actor.optimizer.learning_rate and resume from an earlier"
            " checkpoint. If no step was taken yet, check the model: weights in model.path that are NaN,"
            " rms_norm_eps and rope_theta in its config.json, and try model.dtype=float32.",
        )
    restricted: Meta = {"is_restricted": True} if sampling.is_restricted else {}
    return Batch.of(
        rows={
            "weight_version": truncated.new_full(truncated.shape, version, dtype=ids.offsets.dtype),
            "truncated": truncated,
        },
        tokens={
            "response_ids": ids,
            "response_mask": logprobs.like(logprobs.values.new_ones(logprobs.values.shape)),
            "rollout_logprobs": logprobs,
        },
        meta={"temperature": sampling.temperature or 1.0} | restricted,
    )
