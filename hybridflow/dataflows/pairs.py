"""Pairs of responses as rows that a model can read: the chosen one, and the rejected one behind it."""

import torch
from torch import Tensor

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import ROWS_TOGETHER
from hybridflow.config.choices import chosen
from hybridflow.config.experiment import Experiment
from hybridflow.dataflows.roles import FrozenModel, Policy


def compares_with_reference(config: Experiment) -> bool:
    """Whether each step asks a reference model, by the loss of `algorithm.preference` and what is precomputed."""
    preference = config.algorithm.preference
    if config.dataflow_settings.get("precompute_reference"):
        return False
    method = PREFERENCE_LOSSES.get(chosen(preference.loss, "algorithm.preference.loss", PREFERENCE_LOSSES))
    return not preference.reference_free and (method is None or method.compares_with_reference)


def reference_sums(rows: Batch, actor: Policy, reference: FrozenModel | None) -> Tensor:
    """`ref_sums` [B, 2] of 2 B rows: by a reference of the run's own, or by the policy before its first step."""
    if reference:
        return reference.logprobs(rows).fetch().tokens("ref_logprobs").row_sums().view(-1, 2)
    return actor.logprobs(rows).fetch().tokens("old_logprobs").row_sums().view(-1, 2)


def rows_of_pairs(pairs: Batch) -> Batch:
    """Two rows per pair: `prompt_ids`, `response_ids`, `response_mask`, `is_chosen`, `margin` and the pair's `uid`.

    `ref_sums` [2 B] from the pairs' [B, 2], where the data has them. What the batch says of itself keeps the two rows
    of a pair in one micro-batch; a division over ranks keeps rows of one `uid` together anyway.
    """
    count = len(pairs)
    responses = interlaced(pairs.tokens("chosen_ids"), pairs.tokens("rejected_ids"))
    rows = {
        "is_chosen": torch.tensor([True, False]).repeat(count),
        "margin": twice(pairs.row("margin")),
        "uid": twice(pairs.row("uid")),
    }
    if "ref_sums" in pairs:
        rows["ref_sums"] = pairs.row("ref_sums").flatten()
    prompts = pairs.tokens("prompt_ids")
    return Batch.of(
        rows=rows,
        tokens={
            "prompt_ids": prompts.select(twice(torch.arange(count))),
            "response_ids": responses,
            "response_mask": responses.like(torch.ones(len(responses.values))),
        },
        meta={ROWS_TOGETHER: 2},
    )


def interlaced(first: Ragged, second: Ragged) -> Ragged:
    """Rows of two columns in turn."""
    both = Ragged.concat([first, second])
    return both.select(torch.arange(len(both)).view(2, -1).T.flatten())


def twice(column: Tensor) -> Tensor:
    """Each row two times, adjacent."""
    return column.repeat_interleave(2, 0)
