"""Converts rows to vLLM requests, and its outputs to columns."""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.shell import ends_of


def token_prompts(prompts: Ragged) -> list[TokensPrompt]:
    """Prompts as token ids, so that vLLM does not tokenize."""
    return [TokensPrompt(prompt_token_ids=row.tolist()) for row in prompts.rows()]


def sampling_params(
    sampling: Sampling,
    row_keys: Sequence[int],
    *,
    max_response_tokens: int,
    eos_token_ids: tuple[int, ...],
    seeded: bool,
) -> list[SamplingParams]:
    """Each request's parameters, with its row key for `RowSampler`.

    With `seeded`, the key is also the request's seed, for the model runner that samples all rows in one kernel. The
    other model runner would create one generator per seed, and sample row by row.
    """
    return [
        SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=key if seeded else None,
            extra_args={"row_key": key, "sampling": sampling},
            max_tokens=max_response_tokens,
            stop_token_ids=list(ends_of(sampling, eos_token_ids)),
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,  # as in `StopSearch`
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            skip_clone=True,
        )
        for key in row_keys
    ]


def answers(outputs: Sequence[RequestOutput]) -> tuple[Ragged, Ragged, Tensor]:
    """Response tokens, their log-probabilities, and which rows reached the length limit, in the order of requests."""
    tokens, logprobs, truncated = [], [], []
    for output in outputs:
        [response] = output.outputs
        assert isinstance(response.logprobs, FlatLogprobs)
        tokens.append(response.token_ids)
        logprobs.append(response.logprobs.logprobs)
        truncated.append(response.finish_reason == "length")
    return (
        Ragged.from_rows(tokens, torch.int64),
        Ragged.from_rows(logprobs, torch.float32),
        torch.tensor(truncated, dtype=torch.bool),
    )
