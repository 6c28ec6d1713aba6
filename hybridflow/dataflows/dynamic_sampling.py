"""Groups of samples that teach something: others are replaced by samples of further prompts (DAPO, sec. 3.2)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.advantages.group_relative import group_statistics
from hybridflow.batch import Batch
from hybridflow.batch.accounting import check_accounted
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import ConfigError
from hybridflow.observability.metrics import Metrics, last, mean

logger = logging.getLogger(__name__)

SMALLEST_SPREAD = 1e-8
"""A group whose scores have no larger standard deviation teaches nothing."""

SampleScored = Callable[[Batch], BatchRef]
"""From prompts to their samples with scores; the samples of a prompt are adjacent."""


@dataclass(frozen=True)
class Gathered:
    """A full batch, the prompts it is of, and what became of all that were drawn."""

    batch: BatchRef
    prompts: Batch
    metrics: Metrics


@dataclass(frozen=True)
class Drawn:
    """All samples of one step so far: their groups in the order in which they were drawn."""

    batch: BatchRef
    uids: list[int]
    teaches: list[bool]

    def chosen(self, wanted: int) -> list[int]:
        """The first groups that teach something; where these are too few, the first of the others fill up."""
        teaching = [place for place, teaches in enumerate(self.teaches) if teaches]
        others = [place for place, teaches in enumerate(self.teaches) if not teaches]
        return sorted((teaching + others)[:wanted])


class DynamicSampling:
    """Draws until as many groups as a step has prompts have unequal scores, or `max_refills` further batches are drawn.

    `metric` says which scores are looked at: `scores`, or those of one reward function by its name. In place of
    `scores` a reward may give `filter_scores`, to judge groups by.
    """

    def __init__(self, sample: SampleScored, further: Callable[[], Batch], *, metric: str, max_refills: int) -> None:
        self._sample = sample
        self._further = further
        self._column = "scores" if metric == "scores" else f"rewards/{metric}"
        self._max_refills = max_refills

    def gather(self, prompts: Batch) -> Gathered:
        """As many groups as there are prompts, of these and of further ones."""
        wanted, rounds, given, teaching = len(prompts), [], [], 0
        while True:
            rounds.append(self._draw(prompts))
            given.append(prompts)
            teaching += sum(rounds[-1].teaches)
            if teaching >= wanted or len(rounds) > self._max_refills:
                break
            prompts = self._further()
        drawn = Drawn(
            BatchRef.concat([each.batch for each in rounds]),
            [uid for each in rounds for uid in each.uids],
            [teaches for each in rounds for teaches in each.teaches],
        )
        return self._taken(drawn, Batch.concat(given), wanted, refills=len(rounds) - 1)

    def _draw(self, prompts: Batch) -> Drawn:
        batch = self._sample(prompts)
        has_own = self._column == "scores" and "filter_scores" in batch.columns
        column = "filter_scores" if has_own else self._column
        if column not in batch.columns:
            functions = [name.removeprefix("rewards/") for name in batch.columns if name.startswith("rewards/")]
            raise ConfigError(
                f"dataflow_settings.filter_metric={self._column.removeprefix('rewards/')} is no score of this run.",
                remedy=f"Use scores, or a reward function: {', '.join(functions)}.",
            )
        spread = group_statistics(batch.row(column).nan_to_num(0.0), batch.row("uid")).std
        uids, teaching = prompts.row("uid"), batch.row("uid")[spread > SMALLEST_SPREAD]
        return Drawn(batch, uids.tolist(), torch.isin(uids, teaching).tolist())

    def _taken(self, drawn: Drawn, prompts: Batch, wanted: int, *, refills: int) -> Gathered:
        chosen = drawn.chosen(wanted)
        uids = torch.tensor(drawn.uids)
        kept = uids[chosen]
        left = torch.ones(len(uids), dtype=torch.bool).index_fill(0, torch.tensor(chosen), value=False)
        teaches = torch.tensor(drawn.teaches)
        discarded, surplus = uids[left & ~teaches], uids[left & teaches]
        check_accounted(
            prompts.row("uid"), torch.cat([kept, discarded, surplus]), samples_per_prompt=1, stage="dynamic sampling"
        )
        without_signal = int((~teaches[chosen]).sum())
        if without_signal:
            logger.warning(
                "dataflow_settings.max_refills=%d: after so many further batches %d of %d groups still have equal"
                " scores and teach nothing; use harder or easier prompts, or more samples per prompt.",
                self._max_refills, without_signal, wanted,
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
        metrics["dapo/signal_fraction"] = mean(float(teaches.float().mean()), len(uids))
        return Gathered(drawn.batch.take(rows_of(kept, drawn.batch.row("uid"))), prompts.select(chosen), metrics)


def rows_of(groups: Tensor, uids: Tensor) -> Tensor:
    """Positions [K] of the rows of some groups, in the order of the batch."""
    return torch.isin(uids, groups).nonzero().flatten()
