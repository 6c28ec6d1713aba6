"""Demonstrations for supervised training: a prompt and the completion to learn, as token ids."""

import logging
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data.chat import Message, Prompt, as_conversation, prompt_flaw
from hybridflow.data.completions import Demonstration, longest_row_tokens, rows_within_limits, tokenised_completions
from hybridflow.data.dialogues import last_reply_begins
from hybridflow.data.joining import joined
from hybridflow.data.prompts import check_prompts, ragged_ids
from hybridflow.data.recognition import column
from hybridflow.data.responses import is_blank, rows_that_speak
from hybridflow.data.selection import read_rows
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_COMPLETIONS = ("completion", "response", "output", "chosen", "answer", "solution", "label")
_WHOLES = ("messages", "text", "chosen")
_PROMPTS = ("prompt", "question", "problem", "instruction", "input")


def load_demonstrations(
    files: Sequence[str], config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> Batch:
    """`prompt_ids`, `response_ids` (the completion and an end-of-sequence), `response_mask`, `prompt`, `data_source`.

    The mask is 1 on what is to be learnt: the completion; every assistant turn of `messages`, whose prompt ends where
    the first of them begins; all but the first token of `text`.
    """
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([_demonstrations_of(name, config, tokenizer, ends) for name in files], files)


def recognise_demonstrations(table: Table, config: Data) -> list[Demonstration]:
    """The demonstrations of a table, by data.prompt_key and data.answer_key or by its columns' names."""
    prompt_name = config.prompt_key or next((name for name in _PROMPTS if name in table.columns), None)
    completion_name = config.answer_key or next((name for name in _COMPLETIONS if name in table.columns), None)
    if prompt_name and completion_name:
        prompts = column(table, prompt_name, key="data.prompt_key")
        if prompt_name == "instruction" and "input" in table.columns:
            prompt_name, prompts = "instruction and input", _with_inputs(prompts, table.columns["input"])
        completions = column(table, completion_name, key="data.answer_key")
        check_prompts(prompts, table)
        pairs = [(as_conversation(p, config), c) for p, c in zip(prompts, completions, strict=True)]
    elif whole := config.prompt_key or next((name for name in _WHOLES if name in table.columns), None):
        prompt_name, values = whole, column(table, whole, key="data.prompt_key")
        check_prompts(values, table)
        completion_name = "assistant turns, or whole texts"
        is_dialogue = whole == "chosen"
        pairs = [
            _cut_text(value, is_dialogue=is_dialogue) if isinstance(value, str) else _before_first_reply(value, config)
            for value in values
        ]
    else:
        raise DataError(
            f"'{table.name}' has no columns known to hold demonstrations; it has: {', '.join(table.columns)}.",
            remedy="Name the columns with data.prompt_key=... and data.answer_key=...",
        )
    found = [Demonstration(p, _completion(c, p, table, row), table.place(row)) for row, (p, c) in enumerate(pairs)]
    turns = sum(isinstance(demonstration.prompt, list) for demonstration in found)
    logger.info(
        "data=%s rows=%d conversations=%d prompt=%s completion=%s read_as=demonstrations",
        table.name, len(table), turns, prompt_name, completion_name,
    )  # fmt: skip
    return found


def _demonstrations_of(name: str, config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Batch:
    table = read_rows(name, config)
    demonstrations = recognise_demonstrations(table, config)
    spoken = rows_that_speak([found.completion for found in demonstrations], table)
    table, demonstrations = table.select(spoken), [demonstrations[row] for row in spoken]
    most = longest_row_tokens(config)
    found = tokenised_completions(demonstrations, tokenizer, ends, most_tokens=most)
    places = [demonstration.place for demonstration in demonstrations]
    kept = rows_within_limits(found.prompts, found.responses, config, places=places)
    response_ids = ragged_ids([found.responses[row] for row in kept])
    mask = torch.tensor([weight for row in kept for weight in found.masks[row]], dtype=torch.float32)
    sources = table.columns.get("data_source", [None] * len(table))
    columns = {name: table.columns[name] for name in (config.difficulty_key,) if name is not None} | {
        "prompt": [demonstration.prompt for demonstration in demonstrations],
        "data_source": [table.data_source if source is None else str(source) for source in sources],
    }
    return Batch.of(
        tokens={
            "prompt_ids": ragged_ids([found.prompts[row] for row in kept]),
            "response_ids": response_ids,
            "response_mask": response_ids.like(mask),
        },
        objects={name: [values[row] for row in kept] for name, values in columns.items()},
    )


def _with_inputs(instructions: list, inputs: list) -> list:
    """Alpaca's layout: what is to be done, and what with, where there is something."""
    both = zip(instructions, inputs, strict=True)
    return [f"{instruction}\n\n{given}" if given else instruction for instruction, given in both]


def _cut_text(text: str, *, is_dialogue: bool) -> tuple[str, str]:
    """A whole text is learnt; of a dialogue (HH) the last reply."""
    begins = last_reply_begins(text) if is_dialogue else 0
    return text[:begins], text[begins:]


def _before_first_reply(turns: list[Message], config: Data) -> tuple[Prompt, list[Message]]:
    """A conversation cut where the assistant first speaks."""
    first = next((turn for turn, message in enumerate(turns) if message["role"] == "assistant"), len(turns))
    prompt = turns[:first]
    return (as_conversation(prompt, config) if prompt else prompt), turns[first:]


def _completion(value: object, prompt: object, table: Table, row: int) -> str | list[Message]:
    """What is to be learnt, checked: text that follows a prompt, or turns of which the last is the assistant's."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and isinstance(prompt, list) and prompt:
        flaw = prompt_flaw(value)
        silent = [turn for turn in value if flaw is None and turn["role"] == "assistant" and is_blank([turn])]
        if flaw is None and not silent and value[-1]["role"] == "assistant":
            return value
        value = flaw or (silent[0] if silent else value)
    place = table.place(row)
    raise DataError(
        f"{place[0].upper()}{place[1:]} does not end with a completion to learn: {str(value)[:80]!r}.",
        remedy="Give text that follows the prompt, or a conversation in which a user speaks first, no assistant turn is"
        " empty and the last turn is the assistant's; data.filters can leave other rows out.",
    )
