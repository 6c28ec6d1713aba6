"""Demonstrations for supervised training: a prompt and the completion to learn, as token ids."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.data import Data
from hybridflow.data.chat import Prompt, rendered, rendered_prompt, text_token_ids
from hybridflow.data.long_rows import rows_within
from hybridflow.data.prompts import check_prompts, ragged_ids
from hybridflow.data.recognition import column
from hybridflow.data.sources import read_table
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_COMPLETIONS = ("completion", "response", "output", "chosen", "answer", "solution")
_PROMPTS = ("prompt", "question", "problem", "input", "instruction")


@dataclass(frozen=True)
class Demonstration:
    """A prompt and what is to follow it. An empty prompt means that the whole text is to be learnt."""

    prompt: Prompt
    completion: str | list[dict[str, str]]


def load_demonstrations(files: Sequence[str], config: Data, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """`prompt_ids`, `response_ids` (the completion and an end-of-sequence), `response_mask` of ones, and `prompt`.

    Prompt and completion are tokenised as one text, cut where the prompt's own tokens end; where a token would
    straddle the cut, they are tokenised apart. Of `messages` the last assistant turn is learnt; of `text` all but its
    first token.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise DataError(
            "The tokenizer has no end-of-sequence token, so a model could not learn to stop.",
            remedy="Set model.tokenizer_path to a tokenizer with one.",
        )
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    tables = [read_table(name) for name in files]
    demonstrations = [found for table in tables for found in recognise_demonstrations(table, config)]
    sources = [table.data_source for table in tables for _ in range(len(table))]
    prompts, responses = _token_ids(demonstrations, tokenizer, eos)
    kept = _rows_within_limits(prompts, responses, config)
    response_ids = ragged_ids([responses[row] for row in kept])
    return Batch.of(
        tokens={
            "prompt_ids": ragged_ids([prompts[row] for row in kept]),
            "response_ids": response_ids,
            "response_mask": _ones(response_ids),
        },
        objects={
            "prompt": [demonstrations[row].prompt for row in kept],
            "data_source": [sources[row] for row in kept],
        },
    )


def recognise_demonstrations(table: Table, config: Data) -> list[Demonstration]:
    """The demonstrations of a table, by data.prompt_key and data.answer_key or by its columns' names."""
    prompt_name = config.prompt_key or next((name for name in _PROMPTS if name in table.columns), None)
    completion_name = config.answer_key or next((name for name in _COMPLETIONS if name in table.columns), None)
    if prompt_name and completion_name:
        prompts = column(table, prompt_name, key="data.prompt_key")
        completions = column(table, completion_name, key="data.answer_key")
        check_prompts(prompts, table.name)
        found = [Demonstration(p, _completion(c)) for p, c in zip(prompts, completions, strict=True)]
    elif "messages" in table.columns:
        prompt_name, completion_name = "messages", "last assistant turn"
        check_prompts(table.columns["messages"], table.name)
        found = [Demonstration(turns[:-1], turns[-1:]) for turns in table.columns["messages"]]
    elif "text" in table.columns:
        prompt_name, completion_name = None, "text"
        check_prompts(table.columns["text"], table.name)
        found = [Demonstration("", text) for text in table.columns["text"]]
    else:
        raise DataError(
            f"'{table.name}' has no columns known to hold demonstrations; it has: {', '.join(table.columns)}.",
            remedy="Name the columns with data.prompt_key=... and data.answer_key=...",
        )
    for row, demonstration in enumerate(found, start=1):
        _check(demonstration, row, table.name)
    logger.info("data=%s rows=%d prompt=%s completion=%s", table.name, len(table), prompt_name, completion_name)
    return found


def _completion(value: object) -> str | list[dict[str, str]]:
    return value if isinstance(value, str | list) else "" if value is None else str(value)


def _check(demonstration: Demonstration, row: int, name: str) -> None:
    completion = demonstration.completion
    if isinstance(completion, str) and completion:
        return
    if isinstance(completion, list) and len(completion) == 1 and completion[0].get("role") == "assistant":
        if isinstance(demonstration.prompt, list) and demonstration.prompt:
            return
    raise DataError(
        f"Row {row} of '{name}' does not end with a completion to learn: {str(completion)[:80]!r}.",
        remedy="Give text that follows the prompt, or a conversation whose last turn is the assistant's.",
    )


def _token_ids(
    demonstrations: Sequence[Demonstration], tokenizer: PreTrainedTokenizerBase, eos: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts' and responses' token ids."""
    prompts: list[list[int]] = [[] for _ in demonstrations]
    responses: list[list[int]] = [[] for _ in demonstrations]
    straddling = 0
    for is_chat in (False, True):
        rows = [row for row, found in enumerate(demonstrations) if isinstance(found.prompt, list) is is_chat]
        texts = [_texts(demonstrations[row], tokenizer) for row in rows]
        heads = text_token_ids([head for head, _ in texts], tokenizer, add_special_tokens=not is_chat)
        wholes = text_token_ids([head + tail for head, tail in texts], tokenizer, add_special_tokens=not is_chat)
        for row, head, whole, (_, tail) in zip(rows, heads, wholes, texts, strict=True):
            if not demonstrations[row].prompt:
                head = whole[:1]
            if whole[: len(head)] == head:
                response = whole[len(head) :]
            else:
                response = text_token_ids([tail], tokenizer, add_special_tokens=False)[0]
                straddling += 1
            prompts[row] = head
            responses[row] = response if response[-1:] == [eos] else [*response, eos]
    if straddling:
        logger.info("data rows=%d are tokenised apart: a token would straddle prompt and completion", straddling)
    return prompts, responses


def _texts(demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The text before the completion, and the completion, as the model is to see them."""
    prompt, completion = demonstration.prompt, demonstration.completion
    if isinstance(prompt, str):
        assert isinstance(completion, str), f"a text prompt with the completion {completion}"
        return prompt, completion
    turns = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    head = rendered_prompt(prompt, tokenizer)
    whole = rendered([*prompt, *turns], tokenizer).rstrip()
    return head, whole[len(head) :] if whole.startswith(head) else turns[0]["content"]


def _rows_within_limits(prompts: list[list[int]], responses: list[list[int]], config: Data) -> list[int]:
    drop = config.drop_long_prompts
    lengths = [len(row) for row in prompts], [len(row) for row in responses]
    limits = config.max_prompt_tokens, config.max_response_tokens
    short = rows_within(lengths[0], limits[0], setting="data.max_prompt_tokens", what="prompts", drop=drop)
    within = rows_within(lengths[1], limits[1], setting="data.max_response_tokens", what="completions", drop=drop)
    return sorted(set(short) & set(within))


def _ones(column: Ragged) -> Ragged:
    return column.like(torch.ones(len(column.values), dtype=torch.float32))
