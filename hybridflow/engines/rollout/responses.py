"""Checks the prompts of `generate`, and builds its columns, for every rollout engine."""

from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.wire import Meta
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import logprob_temperature
from hybridflow.errors import BatchError, EngineError, StaleWeightsError

UNWRITTEN = "have not been written yet"
BEING_WRITTEN = "are being written, or a transfer that wrote them failed"
GIVEN_BACK = "were freed while it slept"


class Readiness:
    """Whether `generate` may be called; shared by all rollout engines.

    States: weights complete <-> incomplete (`lose_weights`, `gain_weights`), awake <-> asleep.
    """

    def __init__(self, missing: str | None = None) -> None:
        self.version = 0
        self.is_asleep = False
        self._missing = missing

    def lose_weights(self, reason: str) -> None:
        """Marks the weights as incomplete; `reason` completes "The rollout's weights ..."."""
        self._missing = reason

    def gain_weights(self, version: int) -> None:
        """Marks the weights as complete, and of one version."""
        self._missing = None
        self.version = version

    def check(self) -> None:
        """Raises if the engine sleeps or its weights are incomplete."""
        if self.is_asleep:
            raise EngineError("The rollout engine is asleep.", remedy="Call wake() before generate().")
        if self._missing is not None:
            raise StaleWeightsError(
                f"The rollout's weights {self._missing}.",
                remedy="Publish the weights (write every slot, then weights_changed) before the next generate.",
            )


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
    """The columns that `generate` adds, on the CPU.

    `response_ids` [B, (R)], including the end-of-sequence token; `response_mask` of ones; `rollout_logprobs`;
    `weight_version` [B]; `truncated` [B] (the length limit was reached before an end of sequence). Metadata: the
    temperature of the log-probabilities, and `is_restricted` if top_p or top_k renormalized them. Raises `EngineError`
    if a log-probability is not finite, because the model's logits are then not finite either.
    """
    logprobs = logprobs.to("cpu")
    _check_finite(logprobs, version)
    restricted: Meta = {"is_restricted": True} if sampling.is_restricted else {}
    return Batch.of(
        rows={
            "weight_version": truncated.new_full(truncated.shape, version, dtype=ids.offsets.dtype).cpu(),
            "truncated": truncated.cpu(),
        },
        tokens={
            "response_ids": ids.to("cpu"),
            "response_mask": logprobs.like(logprobs.values.new_ones(logprobs.values.shape)),
            "rollout_logprobs": logprobs,
        },
        meta={"temperature": logprob_temperature(sampling)} | restricted,
    )


def _check_finite(logprobs: Ragged, version: int) -> None:
    finite = logprobs.values.isfinite()
    if bool(finite.all()):
        return
    num_bad = sum(not bool(row.isfinite().all()) for row in logprobs.rows())
    where = f"in {num_bad} of {len(logprobs)} responses (weights of step {version})"
    raise EngineError(
        f"The model's logits are NaN or infinite {where}.",
        remedy="If the weights diverged in training, lower actor.optimizer.learning_rate and resume from an earlier"
        " checkpoint. If no step was taken yet, check the model: weights in model.path that are NaN,"
        " rms_norm_eps and rope_theta in its config.json, and try model.dtype=float32.",
    )
