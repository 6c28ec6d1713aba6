"""Preferences: a prompt with a chosen and a rejected response, as token ids.

The prompt is in a column of its own, inside both conversations, or the common beginning of two texts.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.columns import COLUMNS
from hybridflow.config.data import Data
from hybridflow.data.column_names import PROMPTS
from hybridflow.data.conversations import (
    Message,
    Prompt,
    Response,
    as_conversation,
    check_end,
    checked,
    common_length,
    duplicates,
    is_blank,
    last_reply_start,
    repeated_length,
    response_of,
    row_error,
    rows_without,
    say_repeated,
)
from hybridflow.data.length_limits import check_kept, completions_within_limits
from hybridflow.data.prompt_parts import openings, warn_of_unused
from hybridflow.data.selection import read_rows
from hybridflow.data.sources import Source, Table, read_files
from hybridflow.data.tokenization import PromptCompletion
from hybridflow.errors import DataError

_LARGEST = torch.finfo(torch.float32).max
_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass(frozen=True)
class Pair:
    """A prompt with its chosen and rejected response; `place` is for errors: `row 3 of 'pairs.jsonl'`."""

    place: str
    prompt: Prompt
    chosen: Response
    rejected: Response

    @property
    def is_tie(self) -> bool:
        """Both responses are the same."""
        return self.chosen == self.rejected


def load_preferences(
    files: Sequence[Source], config: Data, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int] = ()
) -> Batch:
    """One row per pair: `prompt_ids`, `chosen_ids`, `rejected_ids` (each with an end-of-sequence), `margin`.

    `ref_sums` [B, 2] if the data has `ref_chosen_logps` and `ref_rejected_logps`. Objects: `prompt`, `answer`,
    `data_source` and every other column.
    """

    def read(source: Source) -> Batch:
        table = read_rows(source, config, tokenizer)
        pairs, others = recognize_pairs(table, config)
        ids, within = completions_within_limits(
            both_responses(pairs), config, tokenizer, stop_ids, is_part=table.is_part, together=2
        )
        chosen, rejected = ids.responses[::2], ids.responses[1::2]
        kept = [row for row in within if chosen[row] != rejected[row]]
        if len(kept) < len(within):
            table.log(
                logging.WARNING,
                "data.truncation=%s leaves out %d of %d pairs, whose responses are equal in their first %d tokens"
                " (data.max_response_tokens)",
                config.truncation.name, len(within) - len(kept), len(pairs), config.max_response_tokens,
            )  # fmt: skip
        columns = {"prompt_ids": ids.prompts[::2], "chosen_ids": chosen, "rejected_ids": rejected}
        check_kept(len(kept), len(table), config, table, of="pairs")
        tokens = {name: Ragged.from_rows(rows, torch.int64) for name, rows in columns.items()}
        return others.with_columns(tokens=tokens).select(kept)

    return read_files(files, read)


def recognize_pairs(table: Table, config: Data) -> tuple[list[Pair], Batch]:
    """The pairs of a table's `chosen` and `rejected` columns, and its other columns; one log line lists them.

    Pairs with a blank response, and pairs of equal responses, are left out and counted.
    """
    for name in ("chosen", "rejected"):
        if name not in table.columns:
            raise DataError(
                f"'{table.name}' has no column '{name}', so it holds no preferences; it has:"
                f" {', '.join(table.columns)}.",
                remedy="Name its columns prompt, chosen and rejected.",
            )
    prompt_name = config.prompt_key or table.first(PROMPTS)
    prompts = table.column(prompt_name, key="data.prompt_key") if prompt_name else [None] * len(table)
    columns = zip(prompts, table.columns["chosen"], table.columns["rejected"], strict=True)
    found = [pair_of(*row, place=table.place(index)) for index, row in enumerate(columns)]
    if prompt_name:
        say_repeated(table.columns["chosen"], [pair.chosen for pair in found], table)
    ties = [row for row, pair in enumerate(found) if pair.is_tie]
    blanks = [is_blank(pair.chosen) or is_blank(pair.rejected) for pair in found]
    blank = [row for row, pair in enumerate(found) if blanks[row] and not pair.is_tie]
    kept = rows_without({"both responses are the same": ties, "a response is blank": blank}, table, of="pairs")
    before = openings(table, config)
    pairs = [replace(found[row], prompt=as_conversation(found[row].prompt, config, before[row])) for row in kept]
    repeated = duplicates(((pair.prompt, pair.chosen, pair.rejected) for pair in pairs), table)
    num_rows, table = len(table), table.select(kept)
    warn_of_unused([pair.prompt for pair in pairs], table, config)
    margins = enumerate(table.columns.get("margin", [None] * len(table)))
    numbers = [0.0 if value is None else _number(value, "margin", table.place(row)) for row, value in margins]
    objects = other_columns(table, config, used=(prompt_name, "chosen", "rejected", *_REFERENCE))
    table.log(
        logging.INFO,
        "rows=%d format=%s prompt=%s chosen=chosen rejected=rejected other_columns=%s duplicates=%d read_as=pairs",
        num_rows, table.layout or _format_name(pairs, prompt_name), prompt_name or "common_beginning",
        ",".join(name for name in objects if name not in ("answer", "data_source")) or "none", repeated,
    )  # fmt: skip
    return pairs, Batch.of(
        rows={"margin": torch.tensor(numbers)} | _reference(table),
        objects={"prompt": [pair.prompt for pair in pairs]} | objects,
    )


def both_responses(pairs: Sequence[Pair]) -> list[PromptCompletion]:
    """The chosen and the rejected response of each pair, in turn."""
    both = [(pair, response) for pair in pairs for response in (pair.chosen, pair.rejected)]
    return [PromptCompletion(pair.prompt, response, pair.place) for pair, response in both]


def pair_of(prompt: object, chosen: object, rejected: object, *, place: str) -> Pair:
    """The pair of a row; `prompt` is None if it is inside both responses."""
    good = response_of(chosen, what="chosen response", place=place)
    bad = response_of(rejected, what="rejected response", place=place)
    if isinstance(good, list) is not isinstance(bad, list):
        raise row_error(place, "has one response as text and one as messages", "Write both the same way.")
    if prompt is not None:
        pair = Pair(place, checked(prompt, what="prompt", place=place), good, bad)
        return _checked(_without_repeated_prompt(pair))
    if isinstance(good, list) and isinstance(bad, list):
        cut = _common_turns(good, bad)
    else:
        cut = common_beginning(str(good), str(bad))
    found = Pair(place, good[:cut], good[cut:], bad[cut:])
    return found if found.is_tie and not found.prompt else _checked(found)


def common_beginning(chosen: str, rejected: str) -> int:
    """Number of characters of the prompt that two texts begin with.

    Up to the last "Assistant:" of both (HH), else up to the word in which they differ, without the spaces before it.
    """
    cut = common_length(chosen, rejected)
    if start := last_reply_start(chosen[:cut]):
        return start
    while cut > 0 and chosen[cut - 1].isalnum():
        cut -= 1
    while cut > 0 and chosen[cut - 1] == " ":
        cut -= 1
    return cut


def other_columns(table: Table, config: Data, *, used: Sequence[str | None]) -> dict[str, list]:
    """`answer`, `data_source`, and under their own names the columns that are not `used`."""
    answer_name = config.answer_key or ("answer" if "answer" in table.columns else None)
    others = {name: values for name, values in table.columns.items() if name not in COLUMNS and name not in used}
    answers = table.column(answer_name, key="data.answer_key") if answer_name else [None] * len(table)
    return {"answer": answers, "data_source": table.data_sources} | others


def _without_repeated_prompt(pair: Pair) -> Pair:
    """The pair of a prompt column whose responses may repeat the prompt, or continue a reply begun in it."""
    prompt, chosen, rejected = pair.prompt, pair.chosen, pair.rejected
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        cut = min(repeated_length(prompt, chosen), repeated_length(prompt, rejected))
        return replace(pair, chosen=chosen[cut:], rejected=rejected[cut:])
    if isinstance(prompt, str) and chosen[0]["role"] != "assistant":
        cut = _common_turns(chosen, rejected)
        return Pair(pair.place, chosen[:cut], chosen[cut:], rejected[cut:])
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    repeated = len(turns) if chosen[: len(turns)] == turns == rejected[: len(turns)] else 0
    return Pair(pair.place, turns, chosen[repeated:], rejected[repeated:])


def _checked(pair: Pair) -> Pair:
    """The pair, with a prompt and two responses that end with the assistant's turn."""
    if not pair.prompt:
        raise row_error(pair.place, "has no prompt: its texts have no common beginning", "Add a prompt column.")
    check_end(pair.chosen, what="chosen response", place=pair.place)
    check_end(pair.rejected, what="rejected response", place=pair.place)
    return pair


def _common_turns(chosen: list[Message], rejected: list[Message]) -> int:
    """Number of turns of the prompt: those that are the same in both; if all are, all but the last."""
    return common_length(chosen, rejected) - (chosen == rejected)


def _reference(table: Table) -> dict[str, Tensor]:
    """`ref_sums` [N, 2]: log-probabilities of both responses under the reference, in columns named as by TRL."""
    there = [name for name in _REFERENCE if name in table.columns]
    if not there:
        return {}
    if len(there) < len(_REFERENCE):
        (missing,) = {*_REFERENCE} - {*there}
        raise DataError(
            f"'{table.name}' has a column '{there[0]}' but no '{missing}': the reference needs both.",
            remedy=f"Add '{missing}', or leave '{there[0]}' out.",
        )
    both = [[_number(value, name, table.place(row)) for row, value in enumerate(table.columns[name])]
            for name in _REFERENCE]  # fmt: skip
    return {"ref_sums": torch.tensor(both).T.contiguous()}


def _number(value: object, name: str, place: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise DataError(
        f"'{name}' in {place} must be a number that fits float32, not {str(value)[:40]!r}.",
        remedy=f"Give a number in every row, or leave the column '{name}' out.",
    )


def _format_name(pairs: Sequence[Pair], prompt_name: str | None) -> str:
    if any(isinstance(pair.prompt, list) for pair in pairs):
        return "conversations"
    if prompt_name is not None:
        return "prompt,chosen,rejected"
    return "hh_texts" if any("\n\nHuman:" in pair.prompt for pair in pairs) else "texts_with_a_common_prompt"
