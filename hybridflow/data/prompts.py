"""Prompts for generation: read, recognised, tokenised, held to their limit, and laid out as one batch."""

from collections.abc import Sequence
from itertools import chain

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.config.data import Data
from hybridflow.data.chat import prompt_flaw, prompt_token_ids
from hybridflow.data.long_rows import rows_within
from hybridflow.data.recognition import PromptColumns, recognise_prompts
from hybridflow.data.sources import read_table
from hybridflow.errors import DataError


def load_prompts(files: Sequence[str], config: Data, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """All rows of the files, in order: `prompt_ids`, `prompt`, `answer`, `data_source` and every other column.

    A row of a file that lacks another file's column has None there. `uid` is added by who orders the rows.
    """
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    parts = [_checked(name, config) for name in files]
    prompts = [prompt for part in parts for prompt in part.prompts]
    ids = prompt_token_ids(prompts, tokenizer)
    kept = rows_within(
        [len(row) for row in ids],
        config.max_prompt_tokens,
        setting="data.max_prompt_tokens",
        what="prompts",
        drop=config.drop_long_prompts,
    )
    columns = {
        "prompt": prompts,
        "answer": [answer for part in parts for answer in part.answers],
        "data_source": [source for part in parts for source in part.data_sources],
    } | _joined_extras(parts)
    return Batch.of(
        tokens={"prompt_ids": ragged_ids([ids[row] for row in kept])},
        objects={name: [values[row] for row in kept] for name, values in columns.items()},
    )


def ragged_ids(rows: Sequence[Sequence[int]]) -> Ragged:
    """Rows of token ids as one ragged int64 column."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged.from_lengths(torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64), lengths)


def check_prompts(prompts: Sequence[object], name: str) -> None:
    """Raises `DataError` naming the file and the row of the first prompt that is none."""
    for row, prompt in enumerate(prompts, start=1):
        flaw = prompt_flaw(prompt)
        if flaw is not None:
            raise DataError(
                f"The prompt in row {row} of '{name}' {flaw}.",
                remedy='Give text, or messages such as [{"role": "user", "content": "..."}].',
            )


def _checked(name: str, config: Data) -> PromptColumns:
    part = recognise_prompts(read_table(name), prompt_key=config.prompt_key, answer_key=config.answer_key)
    check_prompts(part.prompts, name)
    return part


def _joined_extras(parts: Sequence[PromptColumns]) -> dict[str, list]:
    names = dict.fromkeys(name for part in parts for name in part.extras)
    missing = [[None] * len(part.prompts) for part in parts]
    return {
        name: [value for part, none in zip(parts, missing, strict=True) for value in part.extras.get(name, none)]
        for name in names
    }
