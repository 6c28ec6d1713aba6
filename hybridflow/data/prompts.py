"""Prompts for generation: found in a table by its format, checked, tokenized and limited in length."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.columns import COLUMNS
from hybridflow.config.data import Data
from hybridflow.data.column_names import ANSWERS
from hybridflow.data.conversations import as_conversation, check_prompts, duplicates, last_reply_start
from hybridflow.data.labeled_responses import is_label
from hybridflow.data.length_limits import check_kept, cut_prompts, rows_within, tokens_to_read
from hybridflow.data.prompt_parts import openings, warn_of_unused
from hybridflow.data.selection import read_rows
from hybridflow.data.sources import Source, Table, read_files
from hybridflow.data.tokenization import may_be_cut, prompt_token_ids
from hybridflow.errors import DataError, RewardError

RowCheck = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True)
class Format:
    """A known format of prompts: the columns that identify it, the prompt's column, and possible answer columns.

    A dot reaches into a column of objects: `reward_model.ground_truth`.
    """

    name: str
    known_by: tuple[str, ...]
    prompt: str
    answers: tuple[str, ...] = ANSWERS


# The first that fits is taken, so more specific formats come first.
FORMATS = (
    Format("verl", ("prompt", "reward_model"), "prompt", ("reward_model.ground_truth",)),
    Format("verl_dataset", ("raw_prompt",), "raw_prompt", ("reward_model.ground_truth", *ANSWERS)),
    Format("SkyRL", ("prompt", "reward_spec"), "prompt", ("reward_spec.ground_truth",)),
    Format("DeepSpeed-Chat", ("prompt", "chosen", "rejected"), "prompt", ("answer",)),
    Format("trl_prompt", ("prompt",), "prompt"),
    Format("GSM8K", ("question",), "question"),
    Format("MATH", ("problem",), "problem"),
    Format("OpenRLHF", ("input",), "input", ("label", *ANSWERS)),
    Format("messages", ("messages",), "messages"),
    Format("text", ("text",), "text"),
    Format("HH", ("chosen", "rejected"), "chosen", ()),
)


def load_prompts(
    files: Sequence[Source],
    config: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_functions: Sequence[str] = (),
    row_checks: Sequence[RowCheck] = (),
    as_written: bool = False,
) -> Batch:
    """The rows of the files, in order: `prompt_ids`, `prompt`, `answer`, `data_source` and every other column.

    `answer_functions` are the run's reward functions if all of them need an answer, so that every row must have one.
    Each of `row_checks` is called with the columns of each row; the `RewardError` that it raises for a row that cannot
    be scored becomes a `DataError` with the row's place. The loader adds `uid`. With `as_written`, `prompt` is as in
    the file, without `data.system_prompt`, and all columns of the file are dicts in one column, `written`.
    """

    def read(source: Source) -> Batch:
        table = read_rows(source, config, tokenizer)
        columns = recognize_prompts(table, prompt_key=config.prompt_key, answer_key=config.answer_key)
        check_prompts(columns["prompt"], table)
        if answer_functions:
            _check_answers(columns["answer"], table, answer_functions)
        for check in row_checks:
            _check_rows(columns, table, check)
        both = zip(columns["prompt"], openings(table, config), strict=True)
        prompts = [as_conversation(prompt, config, opening) for prompt, opening in both]
        warn_of_unused(prompts, table, config)
        limit = tokens_to_read(config.max_prompt_tokens, config, keeps_beginning=True)
        ids = prompt_token_ids(prompts, tokenizer, max_tokens=limit)
        batch = Batch.of(
            tokens={"prompt_ids": Ragged.from_rows(cut_prompts(ids, config), torch.int64)},
            objects=_written(columns, table) if as_written else columns | {"prompt": prompts},
        )
        return batch.select(_within_limit(prompts, ids, table, config))

    return read_files(files, read)


def recognize_prompts(table: Table, *, prompt_key: str | None = None, answer_key: str | None = None) -> dict[str, list]:
    """`prompt` (unchecked), `answer` (None if there is none), `data_source` and all other columns of a table.

    The keys, or the table's format, determine the columns; one log line lists them.

    A last assistant turn in a `messages` column is the answer, and the turns before it the prompt. In dialogues with a
    preferred reply (HH), the prompt is what precedes the last reply, and there is no answer.
    """
    known = _format(table, prompt_key)
    prompts = table.column(prompt_key or known.prompt, key="data.prompt_key")
    answer_name = answer_key or next((n for n in known.answers if _has(table, n) and not is_label(table, n)), None)
    answers = table.column(answer_name, key="data.answer_key") if answer_name else [None] * len(table)
    if known.name in ("messages", "HH"):
        parted = [_before_last_reply(conversation) for conversation in prompts]
        prompts, replies = [prompt for prompt, _ in parted], [reply for _, reply in parted]
        if answer_name is None and known.name == "messages":
            answer_name, answers = "last_assistant_turn", replies
    extras = _extras(table, {prompt_key or known.prompt, answer_name, "data_source"})
    is_guessed = known.name == "text" and prompt_key is None
    table.log(
        logging.INFO, "rows=%d format=%s prompt=%s answer=%s other_columns=%s duplicates=%d read_as=prompts%s",
        len(table), table.layout or known.name, prompt_key or known.prompt, answer_name or "none",
        ",".join(extras) or "none", duplicates(zip(prompts, answers, strict=True), table),
        " (a response to each text is generated; hybridflow sft learns the texts)" if is_guessed else "",
    )  # fmt: skip
    return {"prompt": list(prompts), "answer": answers, "data_source": table.data_sources} | extras


def _written(columns: Mapping[str, list], table: Table) -> dict[str, list]:
    rows = [table.row(row) for row in range(len(table))]
    return {name: columns[name] for name in ("prompt", "answer", "data_source")} | {"written": rows}


def _within_limit(prompts: Sequence, ids: Sequence[Sequence[int]], table: Table, config: Data) -> list[int]:
    limit, setting = config.max_prompt_tokens, "data.max_prompt_tokens"
    is_read_in_part = tokens_to_read(limit, config, keeps_beginning=True) is not None
    kept = rows_within(
        [len(row) for row in ids],
        limit,
        setting=setting,
        what="prompts",
        truncation=config.truncation,
        place=table.place,
        is_part=table.is_part,
        at_least={row for row, prompt in enumerate(prompts) if is_read_in_part and may_be_cut(prompt, limit)},
    )
    check_kept(len(kept), len(ids), config, table, of="prompts")
    return kept


def _format(table: Table, prompt_key: str | None) -> Format:
    for known in FORMATS:
        if all(name in table.columns for name in known.known_by) and prompt_key in (None, known.prompt):
            return known
    if prompt_key is not None:
        return Format("prompt_key", (), prompt_key)
    raise DataError(
        f"No column of '{table.name}' is recognized as prompts; its columns are: {', '.join(table.columns)}.",
        remedy="Name the column with data.prompt_key=... (and data.answer_key=...).",
    )


def _has(table: Table, name: str) -> bool:
    return name in table.columns or name.partition(".")[0] in table.columns


def _before_last_reply(conversation: object) -> tuple[object, object]:
    if isinstance(conversation, list) and conversation and isinstance(conversation[-1], dict):
        if conversation[-1].get("role") == "assistant":
            return conversation[:-1], conversation[-1].get("content")
    if isinstance(conversation, str) and (start := last_reply_start(conversation)):
        return conversation[:start], conversation[start:]
    return conversation, None


def _extras(table: Table, used: set[str | None]) -> dict[str, list]:
    """All columns under their own names, except those whose names have another meaning in a batch."""
    reserved = [name for name in table.columns if name in COLUMNS and name not in used]
    if reserved:
        words = "columns=%s do not reach the reward functions: the names are reserved; rename them"
        table.log(logging.WARNING, words, ",".join(reserved))
    return {name: values for name, values in table.columns.items() if name not in COLUMNS}


def _check_answers(answers: Sequence, table: Table, functions: Sequence[str]) -> None:
    without = [row for row, answer in enumerate(answers) if answer is None]
    if without:
        raise DataError(
            f"{len(without)} of {len(table)} rows have no answer, which reward.functions=[{','.join(functions)}] need;"
            f" the first is {table.place(without[0])}.",
            remedy="Name the column with data.answer_key=..., leave such rows out with data.filters, or name a reward"
            " function that needs no answer, such as 'environment' with environment=NAME.",
        )


def _check_rows(columns: Mapping[str, list], table: Table, check: RowCheck) -> None:
    for row in range(len(table)):
        try:
            check({name: values[row] for name, values in columns.items()})
        except RewardError as error:
            raise DataError(f"{table.place(row)}: {error.message}", remedy=error.remedy) from None
