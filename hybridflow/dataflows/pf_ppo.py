"""PF-PPO (arXiv:2409.06957): PPO on samples resampled by score."""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import torch

from hybridflow.algorithms.resampling import WEIGHTINGS, resampled_rows, resampling_weights
from hybridflow.batch import Batch
from hybridflow.batch.row_names import row_names
from hybridflow.config.ranges import FINITE
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.ppo import PPO
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, mean


class PFPPO(PPO):
    """PPO whose update resamples the batch with weights that depend on the scores."""

    settings: "PFPPO.Settings"

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        weighting: str = "max_random"
        """pow (a power of the score), max_min (the best and worst) or max_random (the best four times as often)."""

        power: Annotated[float, FINITE] = 2.0
        """The exponent, for pow."""

        def __post_init__(self) -> None:
            if self.weighting not in WEIGHTINGS:
                raise ConfigError(
                    f"dataflow_settings.weighting={self.weighting} is unknown.",
                    remedy=f"Choose from: {', '.join(WEIGHTINGS)}.",
                )

    def learn(self, batch: BatchRef) -> Metrics:
        """PPO's, with both updates on resampled rows."""
        values = self.critic.values(batch)
        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(values, *old, *reference)

        batch = self.critic.advantages(batch)
        chosen = self.resampled(batch)
        estimated, improved = self.critic.update(ungrouped(chosen)), self.actor.update(ungrouped(chosen))
        wait(improved)
        self.actor.publish_weights(version=self.iteration + 1)
        return wait(estimated, improved) | self.observe(batch) | resampling_metrics(chosen)

    def resampled(self, batch: BatchRef) -> BatchRef:
        """Rows drawn by their scores; the draws depend only on the run's seed and the step."""
        weights = resampling_weights(batch.row("scores"), weighting=self.settings.weighting, power=self.settings.power)
        # A hash, because a CPU generator reads no more than 32 bits of its seed.
        digest = hashlib.sha256(f"{self.seed}/{self.iteration}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        return batch.take(resampled_rows(weights, generator=generator))


def ungrouped(batch: BatchRef) -> BatchRef:
    """The batch with a `uid` per row, so that any rank may take any row.

    Otherwise a few prompts that are drawn often could not be distributed over the ranks.
    """
    return batch.join(Batch.of(rows={"uid": torch.arange(len(batch))}))


def resampling_metrics(chosen: BatchRef) -> Metrics:
    """Metrics of the drawn samples: their mean score, and the fraction of distinct ones."""
    distinct = len({*row_names(chosen)})
    return {
        "pf_ppo/score/mean": mean(float(chosen.row("scores").mean()), len(chosen)),
        "pf_ppo/distinct_fraction": mean(distinct / len(chosen), len(chosen)),
    }
