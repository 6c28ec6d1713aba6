"""Prompts for generation: read, recognised, tokenised, held to their limit, and laid out as one batch."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.data import Data
from hybridflow.data.chat import as_conversation, may_be_cut, prompt_flaw, prompt_token_ids
from hybridflow.data.joining import joined
from hybridflow.data.long_rows import check_left, rows_within
from hybridflow.data.recognition import PromptColumns, recognise_prompts
from hybridflow.data.selection import read_rows
from hybridflow.data.table import Table
from hybridflow.errors import DataError, RewardError

RowCheck = Callable[[Mapping[str, object]], None]


def load_prompts(
    files: Sequence[str],
    config: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    judges_of_answers: Sequence[str] = (),
    row_checks: Sequence[RowCheck] = (),
) -> Batch:
    """The rows of the files, in order: `prompt_ids`, `prompt`, `answer`, `data_source` and every other column.

    `judges_of_answers` are the reward functions that can do nothing without an answer, where there are no others.
    Each of `row_checks` is called with the columns of each row, and raises `RewardError` for one that cannot be
    judged: a `DataError` here, with its place. `uid` is added by who orders the rows.
    """
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([_prompts_of(name, config, tokenizer, judges_of_answers, row_checks) for name in files], files)


def ragged_ids(rows: Sequence[Sequence[int]]) -> Ragged:
    """Rows of token ids as one ragged int64 column."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged.from_lengths(torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64), lengths)


def check_prompts(prompts: Sequence[object], table: Table) -> None:
    """Raises `DataError` naming the file and the row of the first prompt that is none."""
    for row, prompt in enumerate(prompts):
        flaw = prompt_flaw(prompt)
        if flaw is not None:
            raise DataError(
                f"The prompt in {table.place(row)} {flaw}.",
                remedy='Give text, or messages such as [{"role": "user", "content": "..."}].',
            )


def _prompts_of(
    name: str,
    config: Data,
    tokenizer: PreTrainedTokenizerBase,
    judges: Sequence[str],
    row_checks: Sequence[RowCheck],
) -> Batch:
    table = read_rows(name, config)
    found = recognise_prompts(table, prompt_key=config.prompt_key, answer_key=config.answer_key)
    check_prompts(found.prompts, table)
    if judges:
        _check_answers(found, table, judges)
    for check in row_checks:
        _check_rows(found, table, check)
    prompts = [as_conversation(prompt, config) for prompt in found.prompts]
    ids = prompt_token_ids(prompts, tokenizer, most_tokens=config.max_prompt_tokens)
    kept = rows_within(
        [len(row) for row in ids],
        config.max_prompt_tokens,
        setting="data.max_prompt_tokens",
        what="prompts",
        drop=config.drop_long_prompts,
        place=table.place,
        at_least={row for row, prompt in enumerate(prompts) if may_be_cut(prompt, config.max_prompt_tokens)},
    )
    check_left(len(kept), len(ids), settings="data.max_prompt_tokens")
    columns = {"prompt": prompts, "answer": found.answers, "data_source": found.data_sources} | found.extras
    return Batch.of(
        tokens={"prompt_ids": ragged_ids([ids[row] for row in kept])},
        objects={name: [values[row] for row in kept] for name, values in columns.items()},
    )


def _check_answers(found: PromptColumns, table: Table, judges: Sequence[str]) -> None:
    missing = next((row for row, answer in enumerate(found.answers) if answer is None), None)
    if missing is None:
        return
    without = sum(answer is None for answer in found.answers)
    raise DataError(
        f"{without} of {len(table)} rows have no answer, which reward.functions=[{','.join(judges)}] compare with;"
        f" the first is {table.place(missing)}.",
        remedy="Name the column with data.answer_key=..., leave such rows out with data.filters, or add a reward"
        " function that does without.",
    )


def _check_rows(found: PromptColumns, table: Table, check: RowCheck) -> None:
    columns = {"answer": found.answers} | found.extras
    for row in range(len(table)):
        try:
            check({name: values[row] for name, values in columns.items()})
        except RewardError as error:
            raise DataError(f"{table.place(row)}: {error.message}", remedy=error.remedy) from None
