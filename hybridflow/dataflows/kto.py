"""Kahneman-Tversky optimization (arXiv:2402.01306): single responses labeled desirable or undesirable."""

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.dataflows.dpo import DPO
from hybridflow.dataflows.pairs import two_rows
from hybridflow.errors import BatchError


class KTO(DPO):
    """One step per batch of labeled responses: the step and the evaluation of DPO on other rows.

    With `precompute_reference`, each response keeps its mismatched response for the whole run.
    """

    data = "labelled"

    def precompute(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`mismatched_ids`, and `ref_sums` [B, 2] of each response and its mismatched one."""
        if not self.settings.precompute_reference:
            return {}
        others: dict[str, Tensor | Ragged] = {"mismatched_ids": mismatched_ids(rows)}
        return super().precompute(rows.join(Batch(others))) | others

    def rows(self, preferences: Batch) -> Batch:
        """Two rows per response: see `with_mismatched`."""
        return with_mismatched(preferences)


def with_mismatched(labeled: Batch) -> Batch:
    """Two rows per response: the response, and one to another prompt, which estimates KTO's z0.

    The latter is `mismatched_ids` if the rows have them, otherwise another response of the batch.
    """
    others = labeled.tokens("mismatched_ids") if "mismatched_ids" in labeled else mismatched_ids(labeled)
    rows = {
        "is_chosen": labeled.row("is_chosen").repeat_interleave(2),
        "is_mismatched": torch.tensor([False, True]).repeat(len(labeled)),
    }
    return two_rows(labeled, labeled.tokens("response_ids"), others, rows)


def mismatched_ids(labeled: Batch) -> Ragged:
    """For each row, the response half a batch earlier.

    The previous row is unsuitable: if the data was pairs, it may answer the same prompt.
    """
    count = len(labeled)
    if count < 2:
        raise BatchError(
            "KTO compares responses with those to other prompts, but a batch has only one response.",
            remedy="Set data.batch_size to 2 or more.",
        )
    return labeled.tokens("response_ids").select(torch.arange(count).roll(count // 2))
