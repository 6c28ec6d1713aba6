"""From rows to vLLM's requests, and from its answers to columns."""

from collections.abc import Sequence

import torch
from torch import Tensor
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs

from hybridflow.batch import Ragged
from hybridflow.config.rollout import Sampling


def token_prompts(prompts: Ragged) -> list[TokensPrompt]:
    """Prompts as token ids: vLLM tokenizes nothing."""
    return [TokensPrompt(prompt_token_ids=row.tolist()) for row in prompts.rows()]


def sampling_params(
    sampling: Sampling, seeds: Sequence[int], *, max_response_tokens: int, eos_token_ids: tuple[int, ...]
) -> list[SamplingParams]:
    """One request's parameters a seed.

    A seed a request costs 15 % of the time of a small model (a generator each), and makes samples independent of
    their neighbours and of the engine's history.
    """
    return [
        SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=max_response_tokens,
            stop_token_ids=[] if sampling.ignore_eos else list(eos_token_ids),
            ignore_eos=sampling.ignore_eos,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
        )
        for seed in seeds
    ]


def answers(outputs: Sequence[RequestOutput]) -> tuple[Ragged, Ragged, Tensor]:
    """Response tokens, their log-probabilities, and which rows met the length limit, in the order of the requests."""
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
