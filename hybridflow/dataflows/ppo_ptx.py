"""PPO-ptx (InstructGPT, eq. 2, arXiv:2203.02155): PPO that also trains on pretraining texts."""

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.ppo import PPO
from hybridflow.observability.metrics import Metrics


class PPOPtx(PPO):
    """PPO with texts of `data.pretraining_files` in every update of the policy."""

    reads_pretraining = True

    def step(self, prompts: Batch) -> Metrics:
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))

        scores = self.reward.score(batch)
        values = self.critic.values(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(scores, values, *old, *reference)

        batch = self.critic.advantages(batch)
        texts = self.streams["pretraining"].next()
        metrics = wait(self.critic.update(batch), self.actor.update(batch, texts))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(prompts, batch)
