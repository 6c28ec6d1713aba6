"""DAPO (arXiv:2503.14476): GRPO with clip-higher, dynamic sampling, a loss averaged over tokens, overlong shaping.

Dynamic sampling and the soft punishment of long responses are here; the rest are settings that `algorithm=dapo` chooses
(see trainer_configs/algorithm/dapo.yaml).
"""

from dataclasses import dataclass
from typing import Annotated

from hybridflow.algorithms.response_length import overlong_punishment
from hybridflow.batch import Batch
from hybridflow.config.ranges import AT_LEAST_0, Range
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.dynamic_sampling import DynamicSampling
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.observability.metrics import Metrics

OVERLONG = "rewards/overlong"
"""The punishment's own column, as the reward function `overlong` writes it."""

_PART = Range(
    lambda v: 0 <= v <= 1, "from 0 to 1", "is no part of a response", "Use 0 (no punishment) to 1; DAPO uses 0.2."
)
_PENALTY = Range(lambda v: v >= 0, "of 0 or more", "would reward length", "Use 0 or more; DAPO uses 1.")


class DAPO(Dataflow):
    """Sample and judge until the batch is full of groups that teach something, compare within groups, improve."""

    provides = ()
    compares_samples = True

    actor: Policy
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    settings: "DAPO.Settings"

    @dataclass
    class Settings:
        """What `dataflow_settings.*` may say."""

        max_refills: Annotated[int, AT_LEAST_0] = 10
        """Further batches of prompts that a step may draw; past it, groups without signal fill up."""

        filter_metric: str = "scores"
        """Groups are judged by their `scores` (of an OpenRLHF function that answers `scores` beside its `rewards`, by
        these), or by those of one reward function (`exact_match`)."""

        overlong_buffer: Annotated[float, _PART] = 0.2
        """The last part of `data.max_response_tokens`, over which the length of a response comes to cost
        `overlong_penalty`, as groups are compared, not as they are judged; 0: it costs nothing."""

        overlong_penalty: Annotated[float, _PENALTY] = 1.0
        """What the longest responses cost."""

    def step(self, prompts: Batch) -> Metrics:
        """One DAPO iteration."""
        gathered = self.dynamic_sampling().gather(prompts)
        batch = gathered.batch

        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(self.punished(batch), *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(gathered.prompts, batch) | gathered.metrics

    def dynamic_sampling(self) -> DynamicSampling:
        """How groups are drawn: the step's prompts first, then those that follow in the data."""
        settings, further = self.settings, self.streams["prompts"].next
        return DynamicSampling(self.judged, further, metric=settings.filter_metric, max_refills=settings.max_refills)

    def judged(self, prompts: Batch) -> BatchRef:
        """Samples of prompts, with their scores."""
        return self.reward.score(self.rollout.generate(prompts.repeat(self.samples_per_prompt)))

    def punished(self, batch: BatchRef) -> Batch:
        """`scores` with DAPO's soft punishment (eq. 13), unless the run's own functions have it."""
        scores, settings, longest = batch.row("scores"), self.settings, self.max_response_tokens
        if not settings.overlong_buffer or longest is None or OVERLONG in batch.columns:
            return Batch.of(rows={"scores": scores})
        buffer = max(1, int(settings.overlong_buffer * longest))
        lengths = batch.tokens_of("response_ids").float()
        punishment = overlong_punishment(lengths, max_tokens=longest, buffer_tokens=buffer)
        return Batch.of(rows={"scores": scores + settings.overlong_penalty * punishment, OVERLONG: punishment})
