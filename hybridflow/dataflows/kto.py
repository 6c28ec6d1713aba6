"""Kahneman-Tversky optimization (arXiv:2402.01306): single responses labeled desirable or undesirable."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.config.experiment import Experiment
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pairs import compares_with_reference, reference_sums, two_rows
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.dataflows.stages import evaluated_by_source
from hybridflow.errors import BatchError
from hybridflow.observability.metrics import Metrics


class KTO(Dataflow):
    """One step per batch of labeled responses; rollout and reward are only for the evaluation."""

    data = "labelled"
    rows_per_prompt = 2
    provides = ()

    actor: Policy
    reference: FrozenModel | None
    rollout: Sampler | None
    reward: Scorer | None

    settings: "KTO.Settings"

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        precompute_reference: bool = False
        """Compute the reference log-probabilities once, before the first step, instead of loading a reference; each
        response keeps its mismatched response."""

    @classmethod
    def wants_reference(cls, config: Experiment) -> bool:
        """True, unless the loss reads no reference or its log-probabilities are precomputed."""
        return compares_with_reference(config)

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of labeled responses."""
        metrics = wait(self.actor.preference_step(self._with_reference(with_mismatched(prompts))))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """Metrics of held-out responses: how often the sign of the reward agrees with the label."""
        sources = [source for source in held_out.object("data_source") for _ in range(2)]
        rows = with_mismatched(held_out).with_columns(objects={"data_source": sources})
        return evaluated_by_source(rows, lambda part: self.actor.evaluate(self._with_reference(part)))

    def precompute(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`mismatched_ids`, and `ref_sums` [B, 2] of each response and its mismatched one."""
        if not self.settings.precompute_reference:
            return {}
        others = mismatched_ids(rows)
        both = with_mismatched(rows.with_columns(tokens={"mismatched_ids": others}))
        return {"ref_sums": reference_sums(both, self.actor, self.reference), "mismatched_ids": others}

    def _with_reference(self, rows: Batch) -> Batch | BatchRef:
        return self.reference.logprobs(rows) if self.reference and "ref_sums" not in rows else rows


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
