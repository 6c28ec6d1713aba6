"""ReMax (arXiv:2310.10505): instead of a critic, the score of each prompt's greedy response is the baseline."""

from hybridflow.batch import Batch
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

    def step(self, prompts: Batch) -> Metrics:
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        greedy = self.rollout.generate(prompts.repeat(1), purpose="greedy")

        scores = self.reward.score(batch)
        greedy_scores = self.reward.score(greedy).row("scores")
        baselines = Batch.of(rows={"baselines": greedy_scores.repeat_interleave(self.samples_per_prompt)})
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(scores, baselines, *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(prompts, batch)
