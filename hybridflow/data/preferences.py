"""Preferences: a prompt with the response that people prefer and the one that they do not, as token ids."""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.batch.columns import COLUMNS
from hybridflow.config.data import Data
from hybridflow.data.chat import as_conversation
from hybridflow.data.completions import Demonstration, completion_token_ids, longest_row_tokens, rows_within_limits
from hybridflow.data.joining import joined
from hybridflow.data.pair_texts import Pair, pair_of
from hybridflow.data.prompts import ragged_ids
from hybridflow.data.recognition import column
from hybridflow.data.responses import numbers_of
from hybridflow.data.selection import read_rows
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "question", "instruction", "problem", "input")
"""Columns that may hold the prompt."""

_LARGEST = torch.finfo(torch.float32).max
_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass(frozen=True)
class PairRows:
    """The pairs of a table that can be learnt from, and the columns beside them; `reference` [N, 2] where known."""

    pairs: list[Pair]
    margins: Tensor
    reference: Tensor | None
    objects: dict[str, list]


def load_preferences(
    files: Sequence[str], config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> Batch:
    """One row per pair: `prompt_ids`, `chosen_ids`, `rejected_ids` (each with an end-of-sequence), `margin`.

    `ref_sums` [B, 2] are there where the data has `ref_chosen_logps` and `ref_rejected_logps`. Objects: `prompt`,
    `answer`, `data_source` and every other column.
    """
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([_preferences_of(name, config, tokenizer, ends) for name in files], files)


def recognise_pairs(table: Table, config: Data) -> PairRows:
    """The pairs of a table: `chosen` and `rejected`, with the prompt apart or inside both; one log line says which.

    Pairs of which a response is blank, or whose responses are the same, are left out and counted.
    """
    for name in ("chosen", "rejected"):
        if name not in table.columns:
            raise DataError(
                f"'{table.name}' has no column '{name}', so it holds no preferences; it has:"
                f" {', '.join(table.columns)}.",
                remedy="Name its columns prompt, chosen and rejected.",
            )
    prompt_name = config.prompt_key or next((name for name in PROMPTS if name in table.columns), None)
    prompts = column(table, prompt_name, key="data.prompt_key") if prompt_name else [None] * len(table)
    columns = zip(prompts, table.columns["chosen"], table.columns["rejected"], strict=True)
    found = [pair_of(*row, place=table.place(index)) for index, row in enumerate(columns)]
    kept = _learnable(found, table)
    pairs = [replace(found[row], prompt=as_conversation(found[row].prompt, config)) for row in kept]
    reference = _reference(table)
    objects = objects_beside(table, config, used=(prompt_name, "chosen", "rejected", *_REFERENCE))
    logger.info(
        "data=%s rows=%d recognised=%s prompt=%s chosen=chosen rejected=rejected beside=%s read_as=pairs",
        table.name, len(table), _name_of_layout(pairs[0], prompt_name), prompt_name or "common_beginning",
        ",".join(name for name in objects if name not in ("answer", "data_source")) or "-",
    )  # fmt: skip
    return PairRows(
        pairs,
        torch.tensor(_margins(table))[kept],
        None if reference is None else reference[kept],
        {name: [values[row] for row in kept] for name, values in objects.items()},
    )


def objects_beside(table: Table, config: Data, *, used: Sequence[str | None]) -> dict[str, list]:
    """`answer`, `data_source` and the columns that are not used otherwise, under their own names."""
    answer_name = config.answer_key or ("answer" if "answer" in table.columns else None)
    sources = table.columns.get("data_source", [None] * len(table))
    others = {name: values for name, values in table.columns.items() if name not in COLUMNS and name not in used}
    return {
        "answer": column(table, answer_name, key="data.answer_key") if answer_name else [None] * len(table),
        "data_source": [table.data_source if source is None else str(source) for source in sources],
    } | others


def _preferences_of(name: str, config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Batch:
    found = recognise_pairs(read_rows(name, config), config)
    prompts, chosen = completion_token_ids(
        [Demonstration(pair.prompt, pair.chosen, pair.place) for pair in found.pairs],
        tokenizer,
        ends,
        most_tokens=longest_row_tokens(config),
    )
    _, rejected = completion_token_ids(
        [Demonstration(pair.prompt, pair.rejected, pair.place) for pair in found.pairs],
        tokenizer,
        ends,
        most_tokens=longest_row_tokens(config),
    )
    longer = [max(both, key=len) for both in zip(chosen, rejected, strict=True)]
    kept = rows_within_limits(prompts, longer, config, places=[pair.place for pair in found.pairs])
    reference = {} if found.reference is None else {"ref_sums": found.reference[kept]}
    return Batch.of(
        rows={"margin": found.margins[kept]} | reference,
        tokens={
            "prompt_ids": ragged_ids([prompts[row] for row in kept]),
            "chosen_ids": ragged_ids([chosen[row] for row in kept]),
            "rejected_ids": ragged_ids([rejected[row] for row in kept]),
        },
        objects={"prompt": [found.pairs[row].prompt for row in kept]}
        | {name: [values[row] for row in kept] for name, values in found.objects.items()},
    )


def _learnable(pairs: Sequence[Pair], table: Table) -> list[int]:
    """Positions of the pairs with different, nonblank responses; logs those left out and those that occur twice."""
    even = [row for row, pair in enumerate(pairs) if pair.is_even]
    blank = [row for row, pair in enumerate(pairs) if pair.is_blank and not pair.is_even]
    for what, rows in (("both responses are the same", even), ("a response is blank", blank)):
        if rows:
            logger.warning("data=%s leaves out %d of %d pairs: %s (rows %s)",
                           table.name, len(rows), len(pairs), what, numbers_of(rows, table))  # fmt: skip
    left_out = {*even, *blank}
    kept = [row for row in range(len(pairs)) if row not in left_out]
    if not kept:
        raise DataError(f"'{table.name}' has no pair of two different responses.", remedy="Give pairs to learn from.")
    times = Counter(str((pairs[row].prompt, pairs[row].chosen, pairs[row].rejected)) for row in kept)
    if len(times) < len(kept):
        logger.warning("data=%s pairs=%d are there more than once, and count as often",
                       table.name, len(kept) - len(times))  # fmt: skip
    return kept


def _margins(table: Table) -> list[float]:
    values = table.columns.get("margin", [None] * len(table))
    return [0.0 if value is None else _number(value, "margin", table.place(row)) for row, value in enumerate(values)]


def _reference(table: Table) -> Tensor | None:
    """[N, 2]: log-probabilities of both responses under the reference, as TRL names them."""
    there = [name for name in _REFERENCE if name in table.columns]
    if not there:
        return None
    if len(there) < len(_REFERENCE):
        (missing,) = {*_REFERENCE} - {*there}
        raise DataError(
            f"'{table.name}' has a column '{there[0]}', and no '{missing}': a reference has something to say of both"
            " responses.",
            remedy=f"Add '{missing}', or leave '{there[0]}' out.",
        )
    both = [[_number(value, name, table.place(row)) for row, value in enumerate(table.columns[name])]
            for name in _REFERENCE]  # fmt: skip
    return torch.tensor(both).T.contiguous()


def _number(value: object, name: str, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise DataError(
        f"'{name}' in {place} is no number: {str(value)[:40]!r}.",
        remedy=f"Give a number in every row, or leave the column '{name}' out.",
    )


def _name_of_layout(pair: Pair, prompt_name: str | None) -> str:
    if isinstance(pair.prompt, list):
        return "conversations"
    if prompt_name is not None:
        return "prompt,chosen,rejected"
    return "hh_texts" if "\n\nHuman:" in pair.prompt else "texts_with_a_common_prompt"
