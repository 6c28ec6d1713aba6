"""Supervised fine-tuning: imitate demonstrations."""

import math

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Generates, Policy, Scores
from hybridflow.dataflows.stages import assessed
from hybridflow.observability.metrics import Metrics, last


class SFT(Dataflow):
    """One supervised step per batch; a rollout and a reward only serve the evaluation."""

    data = "demonstrations"
    rows_per_prompt = 1
    provides = ()

    actor: Policy
    rollout: Generates | None
    reward: Scores | None

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of demonstrations."""
        metrics = wait(self.actor.imitate(prompts))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """`val-core/<source>/loss`, the mean of -log p over tokens to be learnt, and `perplexity`, its exponential."""
        losses = assessed(held_out, self.actor.assess)
        perplexities = {
            name.removesuffix("loss") + "perplexity": last(math.exp(min(measure.value, 700.0)))
            for name, measure in losses.items()
            if name.endswith("/loss")
        }
        return losses | perplexities
