"""Preferences as rows for a model: two responses to a prompt, in consecutive rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import ROWS_TOGETHER


def rows_of_pairs(pairs: Batch) -> Batch:
    """Two rows per pair, the chosen response and then the rejected one: `two_rows` with `is_chosen` and `margin`."""
    rows = {
        "is_chosen": torch.tensor([True, False]).repeat(len(pairs)),
        "margin": pairs.row("margin").repeat_interleave(2),
    }
    return two_rows(pairs, pairs.tokens("chosen_ids"), pairs.tokens("rejected_ids"), rows)


def two_rows(source: Batch, first: Ragged, second: Ragged, rows: Mapping[str, Tensor]) -> Batch:
    """Two rows per row of the source, one for each of its responses, and the given row columns [2 B].

    Columns: `prompt_ids`, `response_ids`, `response_mask`, `uid`, and `ref_sums` [2 B] if the source has them [B, 2].
    The metadata keeps the two rows in one microbatch; as they share a `uid`, they stay on one rank too.
    """
    known = {"ref_sums": source.row("ref_sums").flatten()} if "ref_sums" in source else {}
    both = Ragged.concat([first, second])
    responses = both.select(torch.arange(len(both)).view(2, -1).T.flatten())
    return Batch.of(
        rows={**rows, "uid": source.row("uid").repeat_interleave(2), **known},
        tokens={
            "prompt_ids": source.tokens("prompt_ids").select(torch.arange(len(source)).repeat_interleave(2)),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(len(responses.values))),
        },
        meta={ROWS_TOGETHER: 2},
    )
