"""Prompts for rollout engines, and plain transformers' greedy answer to them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.interface import RolloutEngine
from hybridflow.engines.rollout.requests import Responses, make_requests
from hybridflow.engines.rollout.transformers.decode import Decoding
from hybridflow.engines.rollout.transformers.fixed import FixedMemory
from hybridflow.parallel.boxes import intersection, slices_within
from hybridflow.parallel.layout import WeightShard
from tests.toys import token_rows

UNEQUAL = (5, 5, 2, 7, 1, 4)
NEVER = (-1,)
"""No end at all: without any, `generate` takes the one of the model."""


def prompt_rows(lengths: Sequence[int] = UNEQUAL, *, samples: int = 1, seed: int = 0) -> Batch:
    """Random prompts of the given lengths, `samples` adjacent rows each."""
    batch = Batch.of(rows={"uid": torch.arange(len(lengths))}, tokens={"prompt_ids": token_rows(lengths, seed=seed)})
    return batch.repeat(samples)


def same_prompt(times: int, *, length: int = 5, seed: int = 0) -> Batch:
    """One prompt under many uids."""
    ids = token_rows([length], seed=seed).values
    rows = {"uid": torch.arange(times), "sample_index": torch.zeros(times, dtype=torch.int64)}
    return Batch.of(rows=rows, tokens={"prompt_ids": Ragged.from_rows([ids] * times)})


def greedy_answers(
    model: PreTrainedModel, prompts: Batch, *, tokens: int, ends: tuple[int, ...] = ()
) -> list[list[int]]:
    """What `model.generate` answers to each prompt alone, up to and with the first of `ends`."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=list(ends or NEVER))
    answers = []
    for prompt in prompts.tokens("prompt_ids").rows():
        ids = model.generate(inputs=prompt[None], attention_mask=torch.ones(1, len(prompt)), generation_config=config)
        assert isinstance(ids, Tensor)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


def responses(batch: Batch) -> list[list[int]]:
    """Response tokens, row by row."""
    return [row.tolist() for row in batch.tokens("response_ids").rows()]


def decoded(
    model: PreTrainedModel,
    prompts: Batch,
    sampling: Sampling,
    *,
    tokens: int,
    ends: tuple[int, ...],
    memory: FixedMemory | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Responses:
    """The responses of one `Decoding` of all prompts, with seed 3."""
    requests = make_requests(prompts, sampling, max_response_tokens=tokens, seed=3, version=0, first_number=0)
    decoding = Decoding(model, requests, eos_token_ids=ends, memory=memory, tokenizer=tokenizer)
    decoding.check()
    while decoding.num_unfinished:
        decoding.advance()
        decoding.check()
    return Responses.concat(decoding.take())


@torch.no_grad()
def write_slots(engine: RolloutEngine, shards: Iterable[WeightShard]) -> None:
    """Copies what each shard and the slot of its name have in common, as a transfer does."""
    engine.pause()
    slots = engine.weight_slots()
    for shard in shards:
        slot = slots.get(shard.name)
        common = None if slot is None else intersection(slot.layout.box, shard.layout.box)
        if slot is not None and common is not None:
            target = slot.tensor[slices_within(common, slot.layout.box)]
            target.copy_(shard.tensor[slices_within(common, shard.layout.box)])
