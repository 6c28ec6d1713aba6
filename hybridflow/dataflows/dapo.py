"""DAPO (arXiv:2503.14476): GRPO with clip-higher, dynamic sampling, a token-level loss, and overlong shaping.

This file has dynamic sampling and the overlong punishment; `trainer_configs/algorithm/dapo.yaml` has the rest.
"""

import logging
from collections.abc import Callable
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

_PART = Range(
    lambda v: 0 <= v <= 1,
    "from 0 to 1",
    "is not a fraction",
    "Use 0 (no punishment) to 1; DAPO uses 0.2.",
)
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

    def dynamic_sampling(self) -> "DynamicSampling":
        """Dynamic sampling of the step's prompts and of those after them in the data."""
        settings, further = self.settings, self.streams["prompts"].next
        return DynamicSampling(self.sample, further, metric=settings.filter_metric, max_refills=settings.max_refills)

    def sample(self, prompts: Batch) -> BatchRef:
        """Samples of the prompts, with scores."""
        return self.reward.score(self.rollout.generate(prompts.repeat(self.samples_per_prompt)))

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

SampleScored = Callable[[Batch], BatchRef]
"""Samples prompts and scores the samples; those of a prompt are adjacent."""


@dataclass(frozen=True)
class Gathered:
    """A full batch, its prompts, and metrics of all drawn groups."""

    batch: BatchRef
    prompts: Batch
    metrics: Metrics


@dataclass(frozen=True)
class Drawn:
    """All samples of a step so far, and whether each group carries a signal, in the order of drawing."""

    batch: BatchRef
    uids: list[int]
    has_signal: list[bool]

    def chosen(self, wanted: int) -> list[int]:
        """The first groups with a signal; if there are too few, the first others fill the batch."""
        with_signal = [place for place, has_signal in enumerate(self.has_signal) if has_signal]
        others = [place for place, has_signal in enumerate(self.has_signal) if not has_signal]
        return sorted((with_signal + others)[:wanted])


class DynamicSampling:
    """Draws batches until enough groups have unequal scores, or `max_refills` extra batches are drawn (DAPO, sec. 3.2).

    `metric` names the scores: `scores`, or those of a reward function. Instead of `scores`, the `filter_scores` of a
    reward are compared if it has them.
    """

    def __init__(self, sample: SampleScored, further: Callable[[], Batch], *, metric: str, max_refills: int) -> None:
        self._sample = sample
        self._further = further
        self._column = "scores" if metric == "scores" else f"rewards/{metric}"
        self._max_refills = max_refills

    def gather(self, prompts: Batch) -> Gathered:
        """As many groups as there are prompts, drawn from these and from further prompts."""
        wanted, rounds, given, with_signal = len(prompts), [], [], 0
        while True:
            rounds.append(self._draw(prompts))
            given.append(prompts)
            with_signal += sum(rounds[-1].has_signal)
            if with_signal >= wanted or len(rounds) > self._max_refills:
                break
            prompts = self._further()
        drawn = Drawn(
            BatchRef.concat([each.batch for each in rounds]),
            [uid for each in rounds for uid in each.uids],
            [has_signal for each in rounds for has_signal in each.has_signal],
        )
        return self._taken(drawn, Batch.concat(given), wanted, refills=len(rounds) - 1)

    def _draw(self, prompts: Batch) -> Drawn:
        batch = self._sample(prompts)
        has_own = self._column == "scores" and "filter_scores" in batch.columns
        column = "filter_scores" if has_own else self._column
        if column not in batch.columns:
            functions = [name.removeprefix("rewards/") for name in batch.columns if name.startswith("rewards/")]
            raise ConfigError(
                f"dataflow_settings.filter_metric={self._column.removeprefix('rewards/')} is not a score of this run.",
                remedy=f"Use scores, or a reward function: {', '.join(functions)}.",
            )
        spread = group_statistics(batch.row(column).nan_to_num(0.0), batch.row("uid")).std
        uids, with_signal = prompts.row("uid"), batch.row("uid")[spread > SMALLEST_SPREAD]
        return Drawn(batch, uids.tolist(), torch.isin(uids, with_signal).tolist())

    def _taken(self, drawn: Drawn, prompts: Batch, wanted: int, *, refills: int) -> Gathered:
        chosen = drawn.chosen(wanted)
        uids = torch.tensor(drawn.uids)
        kept = uids[chosen]
        left = torch.ones(len(uids), dtype=torch.bool).index_fill(0, torch.tensor(chosen), value=False)
        has_signal = torch.tensor(drawn.has_signal)
        discarded, surplus = uids[left & ~has_signal], uids[left & has_signal]
        check_accounted(
            prompts.row("uid"), torch.cat([kept, discarded, surplus]), samples_per_prompt=1, stage="dynamic sampling"
        )
        without_signal = int((~has_signal[chosen]).sum())
        if without_signal:
            logger.warning(
                "%d of %d groups still have zero reward variance after dataflow_settings.max_refills=%d extra batches:"
                " use harder or easier prompts, or more samples per prompt.",
                without_signal, wanted, self._max_refills,
            )  # fmt: skip
        numbers = {
            "prompts_drawn": len(uids),
            "groups_kept": wanted - without_signal,
            "groups_discarded": len(discarded),
            "groups_surplus": len(surplus),
            "groups_without_signal": without_signal,
            "refills": refills,
        }
        metrics = {f"dapo/{name}": last(number) for name, number in numbers.items()}
        metrics["dapo/signal_fraction"] = mean(float(has_signal.float().mean()), len(uids))
        return Gathered(drawn.batch.take(_rows_of(kept, drawn.batch.row("uid"))), prompts.select(chosen), metrics)


def _rows_of(groups: Tensor, uids: Tensor) -> Tensor:
    """Positions [K] of the rows of the given groups, in batch order."""
    return torch.isin(uids, groups).nonzero().flatten()
