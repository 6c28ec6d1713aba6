"""Supervised fine-tuning on demonstrations."""

import math

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Policy, Sampler, Scorer
from hybridflow.dataflows.stages import evaluated_by_source
from hybridflow.observability.metrics import Metrics, last


class SFT(Dataflow):
    """One supervised step per batch; rollout and reward are only for the evaluation."""

    data = "demonstrations"
    rows_per_prompt = 1
    provides = ()

    actor: Policy
    rollout: Sampler | None
    reward: Scorer | None

    def step(self, prompts: Batch) -> Metrics:
        """One pass over a batch of demonstrations."""
        metrics = wait(self.actor.supervised_step(prompts))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics

    def evaluate(self, held_out: Batch) -> Metrics:
        """`val-core/<source>/loss`, the mean of -log p over response tokens, and its exponential, `perplexity`."""
        losses = evaluated_by_source(held_out, self.actor.evaluate)
        perplexities = {
            name.removesuffix("loss") + "perplexity": last(math.exp(min(measure.value, 700.0)))
            for name, measure in losses.items()
            if name.endswith("/loss")
        }
        return losses | perplexities
