"""Converts requests to those of vLLM, and its outputs to responses."""

from collections.abc import Mapping, Sequence

import torch
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from hybridflow.batch import Ragged
from hybridflow.engines.rollout.requests import Request, Responses
from hybridflow.engines.rollout.shell import ends_of


def sampling_params(request: Request, *, eos_token_ids: tuple[int, ...], seeded: bool) -> SamplingParams:
    """A request's parameters, with its row key for `RowSampler`.

    With `seeded`, the key is also the request's seed, for the model runner that samples all rows in one kernel. The
    other model runner would create one generator per seed, and sample row by row.
    """
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.key if seeded else None,
        extra_args={"row_key": request.key, "sampling": sampling},
        max_tokens=request.max_response_tokens,
        stop_token_ids=list(ends_of(sampling, eos_token_ids)),
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,  # as in `StopSearch`
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def responses(outputs: Sequence[RequestOutput], requests: Mapping[int, Request]) -> Responses:
    """Finished outputs as the responses to their requests, which are given by number."""
    tokens, logprobs, truncated = [], [], []
    for output in outputs:
        [response] = output.outputs
        assert isinstance(response.logprobs, FlatLogprobs)
        tokens.append(response.token_ids)
        logprobs.append(response.logprobs.logprobs)
        truncated.append(response.finish_reason == "length")
    return Responses(
        [requests[int(output.request_id)] for output in outputs],
        Ragged.from_rows(tokens, torch.int64),
        Ragged.from_rows(logprobs, torch.float32),
        torch.tensor(truncated, dtype=torch.bool),
    )
