"""DAPO (arXiv:2503.14476): GRPO with clip-higher, dynamic sampling, a token-level loss, and overlong shaping.

This file has dynamic sampling and the overlong punishment; `trainer_configs/algorithm/dapo.yaml` has the rest.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.algorithms.response_length import overlong_punishment
from hybridflow.batch import Batch
from hybridflow.batch.accounting import check_accounted
from hybridflow.config.ranges import AT_LEAST_0, Range
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.futures import wait
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, mean

logger = logging.getLogger(__name__)

OVERLONG = "rewards/overlong"
"""The column of the punishment, which the reward function `overlong` also writes."""

_PART = Range(lambda v: 0 <= v <= 1, "from 0 to 1", "is not a fraction", "Use 0 (no punishment) to 1; DAPO uses 0.2.")
_PENALTY = Range(lambda v: v >= 0, "of 0 or more", "would reward length", "Use 0 or more; DAPO uses 1.")


class DAPO(Dataflow):
    """Sample and score until the batch is full of groups with a signal, compare within groups, improve, publish."""

    provides = ()
    compares_samples = True

    actor: Policy
    rollout: Sampler
    reward: Scorer
    reference: FrozenModel | None

    settings: "DAPO.Settings"

    @dataclass
    class Settings:
        """`dataflow_settings.*`."""

        max_refills: Annotated[int, AT_LEAST_0] = 10
        """Extra batches of prompts that a step may draw; then groups without a signal fill the batch."""

        filter_metric: str = "scores"
        """The scores that must differ within a group: `scores` (those that an OpenRLHF function returns as `scores`, if
        it does), or the name of a reward function."""

        overlong_buffer: Annotated[float, _PART] = 0.2
        """The last fraction of `data.max_response_tokens`, over which the punishment grows to `overlong_penalty`. It
        affects advantages but not `filter_metric`; 0 disables it."""

        overlong_penalty: Annotated[float, _PENALTY] = 1.0
        """The punishment of the longest responses."""

    def collect(self, prompts: Batch) -> BatchRef:
        return self.reward.score(self.rollout.generate(prompts.repeat(self.samples_per_prompt)))

    def learn(self, batch: BatchRef) -> Metrics:
        """Refills the batch first: which groups have a signal is known only now, so `collect` does not wait for it.

        With `filters_ahead`, the groups without a signal have already been replaced.
        """
        settings = self.settings
        refill = None if self.filters_ahead else self.refill
        gathered = dynamic_sampling(batch, refill, metric=settings.filter_metric, max_refills=settings.max_refills)
        batch = gathered.batch

        old = [self.actor.logprobs(batch)] if self.wants_old_logprobs else []
        reference = [self.reference.logprobs(batch)] if self.reference else []
        batch = batch.join(self.punished(batch), *old, *reference)

        batch = self.actor.advantages(batch)
        metrics = wait(self.actor.update(batch))
        self.actor.publish_weights(version=self.iteration + 1)
        return metrics | self.observe(batch, unused=gathered.unused) | gathered.metrics

    def filter_out(self, batch: BatchRef, *, num_filtered: int, groups_per_step: int) -> Sequence[int]:
        """The groups without a signal, until `max_refills` batches of them have been discarded."""
        left = max(0, self.settings.max_refills * groups_per_step - num_filtered)
        return _prompts_of(batch)[~_has_signal(batch, self.settings.filter_metric)].tolist()[:left]

    def refill(self) -> BatchRef:
        """Samples of the next prompts of the stream, with scores."""
        prompts = self.streams["prompts"].next()
        batch = self.collect(prompts)
        uids = prompts.row("uid"), batch.row("uid")
        check_accounted(*uids, samples_per_prompt=self.samples_per_prompt, stage="dynamic sampling")
        return batch

    def punished(self, batch: BatchRef) -> Batch:
        """`scores` with DAPO's soft punishment (eq. 13), unless one of the run's reward functions has computed it."""
        scores, settings, longest = batch.row("scores"), self.settings, self.max_response_tokens
        if not settings.overlong_buffer or longest is None or OVERLONG in batch.columns:
            return Batch.of(rows={"scores": scores})
        buffer = max(1, int(settings.overlong_buffer * longest))
        lengths = batch.tokens_of("response_ids").float()
        punishment = overlong_punishment(lengths, max_tokens=longest, buffer_tokens=buffer)
        return Batch.of(rows={"scores": scores + settings.overlong_penalty * punishment, OVERLONG: punishment})


SMALLEST_SPREAD = 1e-8
"""A group whose scores have no larger standard deviation carries no signal."""


@dataclass(frozen=True)
class Gathered:
    """A full batch, the other drawn rows, and metrics of all drawn groups."""

    batch: BatchRef
    unused: BatchRef
    metrics: Metrics


def dynamic_sampling(
    first: BatchRef, further: Callable[[], BatchRef] | None, *, metric: str, max_refills: int
) -> Gathered:
    """As many groups as `first` has, taken from it and from further batches (DAPO, sec. 3.2).

    Draws batches until enough groups have unequal scores, or `max_refills` extra batches are drawn; then the first
    groups without a signal fill the batch. If `further` is None, they were replaced before, as far as the limit allows.
    `metric` names the scores: `scores`, or those of a reward function. Instead of `scores`, the `filter_scores` of a
    reward are compared if it has them.
    """
    drawn, given, flags = [first], [_prompts_of(first)], [_has_signal(first, metric)]
    wanted = len(given[0])
    while further and int(torch.cat(flags).sum()) < wanted and len(drawn) <= max_refills:
        drawn.append(further())
        given.append(_prompts_of(drawn[-1]))
        flags.append(_has_signal(drawn[-1], metric))
    batch, uids, has_signal = BatchRef.concat(drawn), torch.cat(given), torch.cat(flags)
    chosen = torch.cat([has_signal.nonzero(), (~has_signal).nonzero()]).flatten()[:wanted].sort().values
    left = torch.ones(len(uids), dtype=torch.bool).index_fill(0, chosen, value=False)
    kept, discarded, surplus = uids[chosen], uids[left & ~has_signal], uids[left & has_signal]
    check_accounted(uids, torch.cat([kept, discarded, surplus]), samples_per_prompt=1, stage="dynamic sampling")
    without_signal = int((~has_signal[chosen]).sum())
    if without_signal:
        logger.warning(
            "%d of %d groups still have zero reward variance with dataflow_settings.max_refills=%d extra batches:"
            " use harder or easier prompts, or more samples per prompt.",
            without_signal, wanted, max_refills,
        )  # fmt: skip
    numbers = {"groups_kept": wanted - without_signal, "groups_without_signal": without_signal}
    if further is not None:
        numbers |= {"prompts_drawn": len(uids), "refills": len(drawn) - 1}
        numbers |= {"groups_discarded": len(discarded), "groups_surplus": len(surplus)}
    metrics = {f"dapo/{name}": last(number) for name, number in numbers.items()}
    if further is not None:
        metrics["dapo/signal_fraction"] = mean(float(has_signal.float().mean()), len(uids))
    is_kept = torch.isin(batch.row("uid"), kept)
    return Gathered(batch.take(is_kept.nonzero().flatten()), batch.take(~is_kept), metrics)


def _prompts_of(batch: BatchRef) -> Tensor:
    """The `uid` of each group, in order; the samples of a prompt are adjacent."""
    return batch.row("uid").unique_consecutive()


def _has_signal(batch: BatchRef, metric: str) -> Tensor:
    """Whether the scores of each prompt's group differ."""
    column = "scores" if metric == "scores" else f"rewards/{metric}"
    if column == "scores" and "filter_scores" in batch.columns:
        column = "filter_scores"
    if column not in batch.columns:
        functions = [name.removeprefix("rewards/") for name in batch.columns if name.startswith("rewards/")]
        raise ConfigError(
            f"dataflow_settings.filter_metric={metric} is not a score of this run.",
            remedy=f"Use scores, or a reward function: {', '.join(functions)}.",
        )
    spread = group_statistics(batch.row(column).nan_to_num(0.0), batch.row("uid")).std
    return torch.isin(_prompts_of(batch), batch.row("uid")[spread > SMALLEST_SPREAD])
