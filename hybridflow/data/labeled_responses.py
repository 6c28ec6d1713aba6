"""Labeled responses (unpaired preferences, as for KTO): a prompt, a response, and whether the response is good."""

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
    as_conversation,
    check_prompts,
    duplicates,
    is_blank,
    response_of,
    rows_without,
    say_repeated,
    split_completion,
)
from hybridflow.data.length_limits import check_kept, completions_within_limits
from hybridflow.data.preferences import both_responses, other_columns, recognize_pairs
from hybridflow.data.prompt_parts import openings, warn_of_unused
from hybridflow.data.selection import read_rows
from hybridflow.data.sources import Source, Table, read_files
from hybridflow.data.tokenization import PromptCompletion
from hybridflow.errors import DataError


def load_labeled(
    files: Sequence[Source], config: Data, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()
) -> Batch:
    """One row per response: `prompt_ids`, `response_ids` (with an end-of-sequence), and `is_chosen`, its label.

    A file of pairs gives two rows per pair. Objects: `prompt`, `answer`, `data_source` and every other column.
    """

    def read(source: Source) -> Batch:
        table = read_rows(source, config, tokenizer)
        responses, others = recognize_labeled(table, config)
        ids, kept = completions_within_limits(responses, config, tokenizer, stop_ids, is_part=table.is_part)
        columns = {"prompt_ids": ids.prompts, "response_ids": ids.responses}
        total = len(table) * (1 if "label" in table.columns else 2)  # a pair gives two responses
        check_kept(len(kept), total, config, table, of="responses")
        tokens = {name: Ragged.from_rows(rows, torch.int64) for name, rows in columns.items()}
        return others.with_columns(tokens=tokens).select(kept)

    return read_files(files, read)


def is_label(table: Table, name: str) -> bool:
    """Whether a column labels the responses of a table as good or bad (KTO), and so holds no answers.

    With conversations, 0 and 1 may mean anything else.
    """
    kinds = bool | int | float if table.first(COMPLETIONS) else bool
    has_responses = table.first((*COMPLETIONS, "messages")) is not None
    labels = name in LABELS and name in table.columns and has_responses
    return labels and all(isinstance(value, kinds) and value in (0, 1) for value in table.columns[name])


def labeled_bad(table: Table) -> list[int]:
    """Positions of the rows with responses that are labeled as bad."""
    name = next((name for name in LABELS if is_label(table, name)), None)
    return [] if name is None else [row for row, value in enumerate(table.columns[name]) if not value]


def recognize_labeled(table: Table, config: Data) -> tuple[list[PromptCompletion], Batch]:
    """The responses of a table, and its other columns: those with a `label`, or both responses of each pair.

    Of a pair, the chosen response is a good one and the rejected one is bad.
    """
    if "label" not in table.columns and "chosen" in table.columns:
        pairs, others = recognize_pairs(table, config)
        twice = torch.arange(len(pairs)).repeat_interleave(2)
        is_chosen = torch.tensor([True, False]).repeat(len(pairs))
        return both_responses(pairs), others.only(others.objects).select(twice).with_columns(
            rows={"is_chosen": is_chosen}
        )
    prompt_name = config.prompt_key or table.first(PROMPTS)
    completion_name = table.first(COMPLETIONS)
    if "label" not in table.columns or prompt_name is None or completion_name is None:
        raise DataError(
            f"'{table.name}' holds no labeled responses; it has: {', '.join(table.columns)}.",
            remedy="Name its columns prompt, completion and label (true or false), or prompt, chosen and rejected.",
        )
    prompts = table.column(prompt_name, key="data.prompt_key")
    check_prompts(prompts, table)
    columns = zip(prompts, table.columns[completion_name], openings(table, config), strict=True)
    found = [_prompt_completion(*cells, config, table.place(row)) for row, cells in enumerate(columns)]
    say_repeated(table.columns[completion_name], [response.completion for response in found], table)
    warn_of_unused([response.prompt for response in found], table, config)
    blank = [row for row, response in enumerate(found) if is_blank(response.completion)]
    kept = rows_without({"blank completions": blank}, table, of="rows")
    num_rows, table = len(table), table.select(kept)
    labels = [_label(value, table.place(row)) for row, value in enumerate(table.columns["label"])]
    if len(set(labels)) == 1:
        label = str(labels[0]).lower()
        table.log(logging.WARNING, "every label is %s, so KTO cannot contrast good and bad responses", label)
    responses = [found[row] for row in kept]
    table.log(
        logging.INFO, "rows=%d format=%s duplicates=%d read_as=labeled_responses",
        num_rows, table.layout or f"{prompt_name},{completion_name},label",
        duplicates(((response.prompt, response.completion) for response in responses), table),
    )  # fmt: skip
    objects = {"prompt": [response.prompt for response in responses]}
    objects |= other_columns(table, config, used=(prompt_name, completion_name, "label"))
    return responses, Batch.of(rows={"is_chosen": torch.tensor(labels)}, objects=objects)


def _prompt_completion(
    prompt: Prompt, completion: object, opening: Sequence[Message], config: Data, place: str
) -> PromptCompletion:
    response = response_of(completion, what="completion", place=place)
    prompt, response = split_completion(prompt, response, place=place)
    return PromptCompletion(as_conversation(prompt, config, opening), response, place)


def _label(value: object, place: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"The label in {place} is {'the text ' if isinstance(value, str) else ''}{str(value)[:40]!r}.",
        remedy="Give true for a good response and false for a bad one; without quotes, in JSON.",
    )
