"""ReMax (arXiv:2310.10505): instead of a critic, the score of each prompt's greedy response is the baseline."""

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.observability.metrics import Metrics


class ReMax(Dataflow):
    """Sample, also greedily, score both, improve, publish."""

    provides = ("baselines",)

    actor: Policy
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    def collect(self, prompts: Batch) -> BatchRef:
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        scored = self.reward.score(batch)
        greedy = self.rollout.generate(prompts.repeat(1), purpose="greedy")
        return scored.with_companions(greedy=self.reward.score(greedy))

    def learn(self, batch: BatchRef) -> Metrics:
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        greedy_scores = batch.companions["greedy"].row("scores")  # waits for them
        baselines = Batch.of(rows={"baselines": greedy_scores.repeat_interleave(self.samples_per_prompt)})
        batch = batch.join(baselines, *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(batch)
