"""Proximal policy optimization (arXiv:1707.06347), as used in RLHF."""

from hybridflow.batch import Batch
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer, ValueFunction
from hybridflow.observability.metrics import Metrics


class PPO(Dataflow):
    """Sample, score, estimate, improve, publish.

    The weights are published when the actor's update has ended, without waiting for the critic's. If that one then
    fails, the models are restored, their weights are published, and the step is repeated.
    """

    provides = ("values",)

    actor: Policy
    critic: ValueFunction
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    def collect(self, prompts: Batch) -> BatchRef:
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        return self.reward.score(batch)

    def learn(self, batch: BatchRef) -> Metrics:
        values = self.critic.values(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(values, *old, *reference)

        batch = self.critic.advantages(batch)
        estimated, improved = self.critic.update(batch), self.actor.update(batch)
        wait(improved)
        self.actor.publish_weights(version=self.iteration + 1)
        return wait(estimated, improved) | self.observe(batch)
