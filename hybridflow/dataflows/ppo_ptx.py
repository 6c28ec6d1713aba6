"""PPO-ptx (InstructGPT, eq. 2, arXiv:2203.02155): PPO that also trains on pretraining texts."""

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.ppo import PPO
from hybridflow.observability.metrics import Metrics


class PPOPtx(PPO):
    """PPO with texts of `data.pretraining_files` in every update of the policy."""

    reads_pretraining = True

    def learn(self, batch: BatchRef) -> Metrics:
        """PPO's, with texts in the policy's update."""
        values = self.critic.values(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(values, *old, *reference)

        batch = self.critic.advantages(batch)
        texts = self.streams["pretraining"].next()
        estimated, improved = self.critic.update(batch), self.actor.update(batch, texts)
        wait(improved)
        self.actor.publish_weights(version=self.iteration + 1)
        return wait(estimated, improved) | self.observe(batch)
