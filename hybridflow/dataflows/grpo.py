"""Group relative policy optimisation (arXiv:2402.03300): PPO without the critic."""

from dataclasses import dataclass

from hybridflow.batch import Batch
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import Generates, Policy, Predicts, Scores
from hybridflow.observability.metrics import Metrics


class GRPO(Dataflow):
    """Sample a group a prompt, judge, compare within the group, improve, publish."""

    actor: Policy
    rollout: Generates
    reward: Scores
    reference: Predicts | None

    settings: "GRPO.Settings"

    @dataclass
    class Settings:
        """What `dataflow_settings.*` may say."""

        recompute_logprobs: bool = True
        """Compute `old_logprobs` in a pass of their own; without, those of the update's own pass serve, which is the
        same where a batch has one optimizer step."""

    def step(self, prompts: Batch) -> Metrics:
        """One GRPO iteration."""
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))

        scores = self.reward.score(batch)
        old = [self.actor.logprobs(batch)] if self.settings.recompute_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(scores, *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(prompts, batch)
