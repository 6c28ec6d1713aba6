"""Labelled responses: a prompt, a response, and whether people like it; or pairs, taken apart."""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data.chat import Prompt, as_conversation
from hybridflow.data.completions import Demonstration, completion_token_ids, longest_row_tokens, rows_within_limits
from hybridflow.data.joining import joined
from hybridflow.data.preferences import PROMPTS, objects_beside, recognise_pairs
from hybridflow.data.prompts import check_prompts, ragged_ids
from hybridflow.data.recognition import column
from hybridflow.data.responses import behind_prompt, response_of, rows_that_speak
from hybridflow.data.selection import read_rows
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

_COMPLETIONS = ("completion", "response", "output")


@dataclass(frozen=True)
class Labelled:
    """The labelled responses of a table, and the columns beside them."""

    responses: list[Demonstration]
    labels: list[bool]
    objects: dict[str, list]


def load_labelled(
    files: Sequence[str], config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int] = ()
) -> Batch:
    """One row per response: `prompt_ids`, `response_ids` (with an end-of-sequence), and `is_chosen`, its label.

    Files of pairs give two rows per pair. Objects: `prompt`, `answer`, `data_source` and every other column.
    """
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([_labelled_of(name, config, tokenizer, ends) for name in files], files)


def recognise_labelled(table: Table, config: Data) -> Labelled:
    """The responses of a table, by `label` and a completion, or the pairs of `chosen` and `rejected` taken apart."""
    if "label" not in table.columns and "chosen" in table.columns:
        return _apart(table, config)
    prompt_name = config.prompt_key or next((name for name in PROMPTS if name in table.columns), None)
    completion_name = next((name for name in _COMPLETIONS if name in table.columns), None)
    if "label" not in table.columns or prompt_name is None or completion_name is None:
        raise DataError(
            f"'{table.name}' holds no labelled responses; it has: {', '.join(table.columns)}.",
            remedy="Name its columns prompt, completion and label (true or false), or prompt, chosen and rejected.",
        )
    prompts = column(table, prompt_name, key="data.prompt_key")
    check_prompts(prompts, table)
    columns = zip(prompts, table.columns[completion_name], strict=True)
    found = [_demonstration(*both, config, table.place(row)) for row, both in enumerate(columns)]
    labels = [_label(value, table.place(row)) for row, value in enumerate(table.columns["label"])]
    objects = objects_beside(table, config, used=(prompt_name, completion_name, "label"))
    kept = rows_that_speak([one.completion for one in found], table)
    labels = [labels[row] for row in kept]
    if len(set(labels)) == 1:
        logger.warning("data=%s label=%s in every row", table.name, str(labels[0]).lower())
    logger.info(
        "data=%s rows=%d recognised=%s,%s,label read_as=labelled_responses",
        table.name, len(table), prompt_name, completion_name,
    )  # fmt: skip
    return Labelled(
        [found[row] for row in kept], labels, {name: [values[row] for row in kept] for name, values in objects.items()}
    )


def _labelled_of(name: str, config: Data, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> Batch:
    found = recognise_labelled(read_rows(name, config), config)
    most = longest_row_tokens(config)
    prompts, responses = completion_token_ids(found.responses, tokenizer, ends, most_tokens=most)
    kept = rows_within_limits(prompts, responses, config, places=[one.place for one in found.responses])
    return Batch.of(
        rows={"is_chosen": torch.tensor(found.labels)[kept]},
        tokens={
            "prompt_ids": ragged_ids([prompts[row] for row in kept]),
            "response_ids": ragged_ids([responses[row] for row in kept]),
        },
        objects={"prompt": [found.responses[row].prompt for row in kept]}
        | {name: [values[row] for row in kept] for name, values in found.objects.items()},
    )


def _apart(table: Table, config: Data) -> Labelled:
    """Each pair's chosen response as one that is liked, and its rejected one as one that is not, behind it."""
    found = recognise_pairs(table, config)
    both = [
        Demonstration(pair.prompt, response, pair.place)
        for pair in found.pairs
        for response in (pair.chosen, pair.rejected)
    ]
    objects = {name: [value for value in values for _ in range(2)] for name, values in found.objects.items()}
    return Labelled(both, [True, False] * len(found.pairs), objects)


def _demonstration(prompt: Prompt, completion: object, config: Data, place: str) -> Demonstration:
    response = response_of(completion, what="completion", place=place)
    prompt, response = behind_prompt(prompt, response, what="completion", place=place)
    return Demonstration(as_conversation(prompt, config), response, place)


def _label(value: object, place: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise DataError(
        f"The label in {place} is {'the text ' if isinstance(value, str) else ''}{str(value)[:40]!r}.",
        remedy="Give true for a response that is liked, and false for one that is not; without quotes, in JSON.",
    )
