"""Kahneman-Tversky optimisation (arXiv:2402.01306): single responses, and whether people like them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import ROWS_TOGETHER
from hybridflow.config.experiment import Experiment
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.pairs import compares_with_reference, interlaced, reference_sums, twice
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.dataflows.stages import evaluated_by_source
from hybridflow.errors import BatchError
from hybridflow.observability.metrics import Metrics


class KTO(Dataflow):
    """One step per batch of labelled responses; a rollout and a reward only serve the evaluation."""

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
        """What `dataflow_settings.*` may say."""

        precompute_reference: bool = False
        """Give each response one to another prompt for good, and work out once, before the first step, what the model
        as it begins says of both; load no reference."""

    @classmethod
    def wants_reference(cls, config: Experiment) -> bool:
        """Unless the loss compares with none, or its part is precomputed."""
        return compares_with_reference(config)

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of labelled responses."""
        metrics = wait(self.actor.preference_step(self._compared(with_mismatched(prompts))))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """The same of held-out responses: how often their reward is on the side of the label."""
        sources = [source for source in held_out.object("data_source") for _ in range(2)]
        rows = with_mismatched(held_out).with_columns(objects={"data_source": sources})
        return evaluated_by_source(rows, lambda part: self.actor.evaluate(self._compared(part)))

    def foreknown(self, rows: Batch) -> dict[str, Tensor | Ragged]:
        """`mismatched_ids`, and `ref_sums` [B, 2] of each response and of the mismatched one."""
        if not self.settings.precompute_reference:
            return {}
        others = mismatched_ids(rows)
        both = with_mismatched(rows.with_columns(tokens={"mismatched_ids": others}))
        return {"ref_sums": reference_sums(both, self.actor, self.reference), "mismatched_ids": others}

    def _compared(self, rows: Batch) -> Batch | BatchRef:
        return self.reference.logprobs(rows) if self.reference and "ref_sums" not in rows else rows


def with_mismatched(labelled: Batch) -> Batch:
    """Two rows per response: itself, and behind it one to another prompt, to estimate KTO's z0 from.

    It is that of `mismatched_ids`, or another of the batch. `ref_sums` [2 B] are there where the rows have them.
    """
    count = len(labelled)
    others = labelled.tokens("mismatched_ids") if "mismatched_ids" in labelled else mismatched_ids(labelled)
    both = interlaced(labelled.tokens("response_ids"), others)
    rows = {
        "is_chosen": twice(labelled.row("is_chosen")),
        "is_mismatched": torch.tensor([False, True]).repeat(count),
        "uid": twice(labelled.row("uid")),
    }
    if "ref_sums" in labelled:
        rows["ref_sums"] = labelled.row("ref_sums").flatten()
    return Batch.of(
        rows=rows,
        tokens={
            "prompt_ids": labelled.tokens("prompt_ids").select(twice(torch.arange(count))),
            "response_ids": both,
            "response_mask": both.like(torch.ones(len(both.values))),
        },
        meta={ROWS_TOGETHER: 2},
    )


def mismatched_ids(labelled: Batch) -> Ragged:
    """For each row the response half the rows before.

    Not that of the row before: where pairs are taken apart it may be to the same prompt.
    """
    count = len(labelled)
    if count < 2:
        raise BatchError(
            "KTO compares responses with those to other prompts, and a batch has one response alone.",
            remedy="Set data.batch_size to 2 or more.",
        )
    return labelled.tokens("response_ids").select(torch.arange(count).roll(count // 2))
