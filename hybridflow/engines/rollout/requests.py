"""The rows that a rollout engine generates, and the columns of its responses."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.wire import Meta
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.sampling import row_keys
from hybridflow.errors import BatchError, EngineError, NumericError

_NO_TOKENS, _NO_LOGPROBS = torch.empty(0, dtype=torch.int64), torch.empty(0)


@dataclass(eq=False)
class Request:
    """One row that an engine generates, from its submission until it has finished."""

    number: int
    """Identifies the request within its engine; later requests have larger numbers."""

    name: tuple[int, int]
    """`uid` and `sample_index` of the row."""

    prompt: Int64[Tensor, " P"]
    key: int
    """The key of its random numbers; see `row_keys`."""

    sampling: Sampling
    max_response_tokens: int
    runs: list[tuple[int, int]]
    """Weight versions that sampled it, each with the index of its first response token."""

    tokens: Int64[Tensor, " R"] = _NO_TOKENS
    """Tokens sampled before its last interruption, of which the engine keeps no state."""

    logprobs: Tensor = _NO_LOGPROBS

    may_continue: bool = False
    """The prompt of a later request may begin with its prompt and response."""

    def continue_under(self, version: int, *, first_token: int) -> None:
        """Records that weights of `version` sample the tokens from `first_token` on."""
        if self.runs[-1][1] == first_token:
            self.runs.pop()
        if not self.runs or self.runs[-1][0] != version:
            self.runs.append((version, first_token))


@dataclass(frozen=True)
class Responses:
    """The tokens sampled for some requests, in their order."""

    requests: Sequence[Request]
    tokens: Ragged
    logprobs: Ragged
    truncated: Bool[Tensor, " B"]
    """The response was cut off, by its length limit or because it was withdrawn."""

    @staticmethod
    def concat(parts: Sequence["Responses"]) -> "Responses":
        """All responses of several parts, in the order of their requests' numbers."""
        requests = [request for part in parts for request in part.requests]
        none = Ragged.from_rows([], torch.int64), Ragged.from_rows([], torch.float32)
        joined = Responses(
            requests,
            Ragged.concat([none[0], *(part.tokens for part in parts)]),
            Ragged.concat([none[1], *(part.logprobs for part in parts)]),
            torch.cat([torch.zeros(0, dtype=torch.bool), *(part.truncated for part in parts)]),
        )
        order = sorted(range(len(requests)), key=lambda row: requests[row].number)
        return joined if order == list(range(len(requests))) else joined.select(order)

    def select(self, rows: Sequence[int]) -> "Responses":
        """The responses at the given positions, in that order."""
        index = torch.tensor(rows, dtype=torch.int64)
        requests = [self.requests[row] for row in rows]
        return Responses(requests, self.tokens.select(index), self.logprobs.select(index), self.truncated[index])


def make_requests(
    prompts: Batch,
    sampling: Sampling,
    *,
    max_response_tokens: int,
    seed: int,
    version: int,
    first_number: int,
) -> list[Request]:
    """A request for each row of `prompts`, numbered from `first_number`."""
    uids, samples = prompts.row("uid"), prompts.row("sample_index")
    names = zip(uids.tolist(), samples.tolist(), strict=True)
    keys = row_keys(seed, uids, samples).tolist()
    may_continue = prompts.row("may_continue").tolist() if "may_continue" in prompts else [False] * len(keys)
    rows = zip(names, prompts.tokens("prompt_ids").rows(), keys, may_continue, strict=True)
    return [
        Request(number, name, prompt, key, sampling, max_response_tokens, [(version, 0)], may_continue=may)
        for number, (name, prompt, key, may) in enumerate(rows, start=first_number)
    ]


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


def response_batch(responses: Responses, sampling: Sampling) -> Batch:
    """The columns that `generate` adds.

    `response_ids` [B, (R)], including the token that ended it (an end of sequence, one of `stop_token_ids`, or the one
    that completed a stop string); `response_mask` of ones; `rollout_logprobs`; `weight_version` [B] (the oldest);
    `version_runs` [B, (runs), 2]; `truncated` [B] (the response was cut off before any of these ends). Metadata: the
    temperature of the log-probabilities, and `is_restricted` if top_p or top_k renormalized them. Raises `NumericError`
    if a log-probability is not finite, because the model's logits are then not finite either.
    """
    ids, logprobs, truncated = responses.tokens, responses.logprobs, responses.truncated
    runs = [
        [run for run in request.runs if run[1] < length] or request.runs[:1]
        for request, length in zip(responses.requests, ids.lengths.tolist(), strict=True)
    ]
    if not bool(logprobs.values.isfinite().all()):
        bad = [row for row, values in enumerate(logprobs.rows()) if not bool(values.isfinite().all())]
        versions = sorted({version for row in bad for version, _ in runs[row]})
        raise NumericError(
            f"The model's logits are NaN or infinite in {len(bad)} of {len(logprobs)} responses"
            f" (weights of step {', '.join(map(str, versions))}).",
            remedy="If the weights diverged in training, lower actor.optimizer.learning_rate and resume from an earlier"
            " checkpoint. If no step was taken yet, check the model: weights in model.path that are NaN,"
            " rms_norm_eps and rope_theta in its config.json, and try model.dtype=float32.",
        )
    restricted: Meta = {"is_restricted": True} if sampling.is_restricted else {}
    pairs = torch.tensor([run for row in runs for run in row], dtype=torch.int64).reshape(-1, 2)
    return Batch.of(
        rows={
            "weight_version": torch.tensor([min(version for version, _ in row) for row in runs], dtype=torch.int64),
            "truncated": truncated,
        },
        tokens={
            "response_ids": ids,
            "response_mask": logprobs.like(logprobs.values.new_ones(logprobs.values.shape)),
            "rollout_logprobs": logprobs,
            "version_runs": Ragged.from_lengths(pairs, torch.tensor([len(row) for row in runs], dtype=torch.int64)),
        },
        meta={"temperature": sampling.temperature or 1.0} | restricted,
    )
