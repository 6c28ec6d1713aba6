"""Demonstrations for supervised training: a prompt and the completion to learn, as token ids."""

import logging
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.data import Data
from hybridflow.data.column_names import COMPLETIONS, LABELS, PROMPTS
from hybridflow.data.conversations import (
    Message,
    Prompt,
    Response,
    as_conversation,
    check_prompts,
    duplicates,
    is_blank,
    is_learned,
    last_reply_start,
    row_error,
    rows_without,
    say_repeated,
    split_completion,
    text_flaw,
)
from hybridflow.data.labeled_responses import labeled_bad
from hybridflow.data.length_limits import check_kept, completions_within_limits
from hybridflow.data.prompt_parts import openings, warn_of_unused
from hybridflow.data.selection import read_rows
from hybridflow.data.sources import Source, Table, read_files
from hybridflow.data.tokenization import PromptCompletion
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_CONVERSATION = "messages"
_OTHER_COMPLETIONS = ("chosen", "solution", "answer", "label")
"""Used only without a conversation, since such columns may contain less than it does, such as the final answer, which a
solution ends with."""

_WHOLES = ("messages", "text", "chosen")


def load_demonstrations(
    files: Sequence[Source], config: Data, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()
) -> Batch:
    """`prompt_ids`, `response_ids` (the completion and an end-of-sequence), `response_mask`, `prompt`, `data_source`.

    The mask is 1 on the tokens to learn: the completion; every assistant turn of `messages`, whose prompt is what
    precedes the first of them; all but the first token of `text`.
    """

    def read(source: Source) -> Batch:
        table = read_rows(source, config, tokenizer)
        num_rows, rows = len(table), recognize_demonstrations(table, config)
        flaws = {
            "blank completions": [position for position, row in enumerate(rows) if is_blank(row.completion)],
            "the label says that the response is bad": [] if config.answer_key in LABELS else labeled_bad(table),
            "no assistant turn has a weight": [
                position for position, row in enumerate(rows)
                if isinstance(row.completion, list) and not any(map(is_learned, row.completion))
            ],
        }  # fmt: skip
        kept = rows_without(flaws, table, of="rows")
        table, rows = table.select(kept), [rows[row] for row in kept]
        ids, within = completions_within_limits(rows, config, tokenizer, stop_ids, is_part=table.is_part)
        check_kept(len(within), num_rows, config, table, of="rows")
        difficulties = {key: table.columns[key] for key in (config.difficulty_key,) if key is not None}
        return Batch.of(
            tokens={
                "prompt_ids": Ragged.from_rows(ids.prompts, torch.int64),
                "response_ids": Ragged.from_rows(ids.responses, torch.int64),
                "response_mask": Ragged.from_rows(ids.masks, torch.float32),
            },
            objects=difficulties | {"prompt": [row.prompt for row in rows], "data_source": table.data_sources},
        ).select(within)

    return read_files(files, read)


def recognize_demonstrations(table: Table, config: Data) -> list[PromptCompletion]:
    """The demonstrations of a table, by data.prompt_key and data.answer_key or by its columns' names."""
    prompt_name = config.prompt_key or table.first(PROMPTS)
    completion_name = config.answer_key or table.first(COMPLETIONS)
    if completion_name is None and (config.prompt_key or _CONVERSATION not in table.columns):
        completion_name = table.first(_OTHER_COMPLETIONS)
    before = openings(table, config)
    if prompt_name and completion_name and prompt_name != completion_name:
        prompts = table.column(prompt_name, key="data.prompt_key")
        completions = table.column(completion_name, key="data.answer_key")
        check_prompts(prompts, table)
        both = [_of_one_form(*row, table.place(i)) for i, row in enumerate(zip(prompts, completions, strict=True))]
        say_repeated(completions, [completion for _, completion in both], table)
        opened = zip(both, before, strict=True)
        pairs = [(as_conversation(prompt, config, opening), completion) for (prompt, completion), opening in opened]
    elif whole := config.prompt_key or table.first(_WHOLES):
        prompt_name, values = whole, table.column(whole, key="data.prompt_key")
        check_prompts(values, table)
        completion_name = _learned_of_wholes(values, is_dialogue=whole == "chosen")
        opened = zip(values, before, strict=True)
        pairs = [_split(value, opening, config, is_dialogue=whole == "chosen") for value, opening in opened]
    else:
        raise DataError(
            f"'{table.name}' has no columns recognized as demonstrations; it has: {', '.join(table.columns)}.",
            remedy="Name the columns with data.prompt_key=... and data.answer_key=...",
        )
    rows = [
        PromptCompletion(p, _completion(c, p, table.place(row)), table.place(row)) for row, (p, c) in enumerate(pairs)
    ]
    shown = [row.prompt if completion_name in table.columns else (row.prompt, row.completion) for row in rows]
    warn_of_unused(shown, table, config)
    repeated = duplicates(((row.prompt, row.completion) for row in rows), table)
    table.log(
        logging.INFO, "rows=%d format=%s conversations=%d prompt=%s completion=%s duplicates=%d read_as=demonstrations",
        len(table), table.layout or f"{prompt_name},{completion_name}" if completion_name in table.columns else
        table.layout or prompt_name, sum(isinstance(row.prompt, list) for row in rows), prompt_name, completion_name,
        repeated,
    )  # fmt: skip
    return rows


def _of_one_form(prompt: Prompt, completion: object, place: str) -> tuple[Prompt, object]:
    """Both as text or both as messages: a text is the user's turn if the completion is a conversation."""
    if isinstance(completion, str | list) and completion and text_flaw(completion) is None:
        return split_completion(prompt, completion, place=place)
    return prompt, completion


def _learned_of_wholes(wholes: Sequence[Prompt], *, is_dialogue: bool) -> str:
    """Says what is learned of conversations and texts, for the log."""
    conversations = [whole for whole in wholes if not isinstance(whole, str)]
    parts = ["every assistant turn"] if conversations else []
    turns = [turn for conversation in conversations for turn in conversation]
    if any(turn["role"] == "tool" for turn in turns):
        parts = ["every assistant turn, and no tool turn"]
    if any(turn["role"] == "assistant" and not is_learned(turn) for turn in turns):
        parts = ["every assistant turn with a weight"]
    if len(conversations) < len(wholes):
        parts.append("the last reply" if is_dialogue else "the whole text")
    return ", or ".join(parts)


def _split(whole: Prompt, opening: Sequence[Message], config: Data, *, is_dialogue: bool) -> tuple[Prompt, Response]:
    """Prompt and completion: a conversation is cut before the assistant's first turn, a dialogue (HH) before its last
    reply, and any other text is learned whole.
    """
    if isinstance(whole, str):
        start = last_reply_start(whole) if is_dialogue else 0
        return whole[:start], whole[start:]
    first = next((turn for turn, message in enumerate(whole) if message["role"] == "assistant"), len(whole))
    return (as_conversation(whole[:first], config, opening) if first else []), whole[first:]


def _completion(value: object, prompt: object, place: str) -> Response:
    """The checked completion: text that follows a prompt, or turns of which the last is the assistant's."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and isinstance(prompt, list) and prompt:
        flaw = text_flaw(value)
        silent = [turn for turn in value if flaw is None and turn["role"] == "assistant" and is_blank([turn])]
        if flaw is None and not silent and value[-1]["role"] == "assistant":
            return value
        value = flaw or (silent[0] if silent else value)
    raise row_error(
        place,
        f"does not end with a completion to learn: {str(value)[:80]!r}",
        "Give text that follows the prompt, or a conversation in which a user speaks first, no assistant turn is empty"
        " and the last turn is the assistant's; data.filters can leave other rows out.",
    )
