"""Safe RLHF (arXiv:2310.12773): PPO with a limit on the mean of a cost (PPO-Lagrangian)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from hybridflow.algorithms.lagrangian import updated_multiplier
from hybridflow.batch import Batch
from hybridflow.config.ranges import ABOVE_0, FINITE, NOT_BELOW_0
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.roles import Scorer, ValueFunction
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, mean, summary


class SafeRLHF(PPO):
    """PPO with a cost, its critic, and a multiplier between the two advantages."""

    cost_critics = ("cost_critic",)

    cost: Scorer
    cost_critic: ValueFunction

    settings: "SafeRLHF.Settings"

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        cost_limit: Annotated[float, FINITE] = 0.0
        """The limit on the mean cost of a response."""

        multiplier: Annotated[float, ABOVE_0] = 1.0
        """The initial multiplier."""

        multiplier_rate: Annotated[float, NOT_BELOW_0] = 0.1
        """The learning rate of the multiplier's logarithm."""

        multiplier_max: Annotated[float, ABOVE_0] = 5.0
        """The largest multiplier."""

        def __post_init__(self) -> None:
            if self.multiplier > self.multiplier_max:
                raise ConfigError(
                    f"dataflow_settings: multiplier={self.multiplier:g} is above"
                    f" multiplier_max={self.multiplier_max:g}.",
                    remedy="Use a multiplier of at most multiplier_max.",
                )

    def __init__(self, roles: Mapping[str, object], *, settings: object, samples_per_prompt: int) -> None:
        super().__init__(roles, settings=settings, samples_per_prompt=samples_per_prompt)
        self.multiplier = self.settings.multiplier

    def collect(self, prompts: Batch) -> BatchRef:
        """The samples, with their `scores` and `costs` separately: both have a column `scores`."""
        batch = self.rollout.generate(prompts.repeat(self.samples_per_prompt))
        return batch.with_companions(scores=self.reward.score(batch), costs=self.cost.score(batch))

    def learn(self, batch: BatchRef) -> Metrics:
        """PPO's, with a second critic and combined advantages."""
        scores, costs = batch.companions["scores"], batch.companions["costs"]
        values = self.critic.values(batch)
        cost_values = self.cost_critic.values(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(scores, values, *old, *reference)
        costs = costs.join(cost_values, *old, *reference)

        batch, costs = self.critic.advantages(batch), self.cost_critic.advantages(costs)
        self.multiplier = self.multiplier_after(float(costs.row("scores").mean()))
        batch = self.actor.combine_advantages(batch, costs, self.multiplier)
        estimated = self.critic.update(batch), self.cost_critic.update(costs)
        improved = self.actor.update(batch)
        wait(improved)
        self.actor.publish_weights(version=self.iteration + 1)
        return wait(*estimated, improved) | self.observe(batch) | self.cost_metrics(costs)

    def multiplier_after(self, mean_cost: float) -> float:
        """The multiplier after a step on the mean cost of a batch."""
        own = self.settings
        return updated_multiplier(
            self.multiplier, mean_cost, limit=own.cost_limit, rate=own.multiplier_rate, largest=own.multiplier_max
        )

    def cost_metrics(self, costs: BatchRef) -> Metrics:
        """Metrics of the costs of a batch, and the multiplier."""
        found = costs.row("scores")
        beyond = float((found > self.settings.cost_limit).float().mean())
        return summary("safe_rlhf/cost", found.tolist()) | {
            "safe_rlhf/above_limit_fraction": mean(beyond, len(found)),
            "safe_rlhf/multiplier": last(self.multiplier),
        }

    def state(self) -> dict[str, object]:
        """The multiplier."""
        return {"multiplier": self.multiplier}

    def restore(self, state: dict[str, object]) -> None:
        self.multiplier = float(str(state["multiplier"]))
