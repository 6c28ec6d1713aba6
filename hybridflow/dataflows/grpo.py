"""Group relative policy optimization (arXiv:2402.03300): PPO without the critic."""

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
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

    def collect(self, prompts: Batch) -> BatchRef:
        return self.reward.score(self.rollout.generate(prompts.repeat(self.samples_per_prompt)))

    def learn(self, batch: BatchRef) -> Metrics:
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(*old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(batch)
