"""Group relative policy optimization (arXiv:2402.03300): PPO without the critic."""

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.observability.metrics import Metrics


class GRPO(Dataflow):
    """Sample one group per prompt, score, compare within the group, improve, publish."""

    provides = ()

    actor: Policy
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    def step(self, prompts: Batch) -> Metrics:
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))

        scores = self.reward.score(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(scores, *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(prompts, batch)
