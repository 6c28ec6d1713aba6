"""The account of groups and tokens of an asynchronous run: generated = consumed + discarded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import BatchError
from hybridflow.observability.metrics import Metrics, last

REASONS = ("stale", "deadline", "empty", "filtered", "fault")
"""Why a group may be discarded before `learn` (`Ledger.discard`)."""

_METRICS = {
    "tokens_generated": "async/tokens/generated",
    "tokens_consumed": "async/tokens/consumed",
    "tokens_discarded": "async/tokens/discarded",
    "groups_consumed": "async/groups/consumed",
    "groups_discarded": "async/groups/discarded",
    "groups_truncated": "async/groups/truncated",
    **{f"rejected_{reason}": f"async/rejected/{reason}" for reason in REASONS},
}
"""The metric of each total."""


@dataclass
class Ledger:
    """Tokens and groups of all finished steps; a group is a prompt with its samples, known by its `uid`."""

    totals: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.totals = dict.fromkeys(_METRICS, 0) | self.totals

    def discard(self, tokens: int, reason: str) -> None:
        """Counts a group that is discarded before it is trained on, for one of `REASONS`."""
        assert reason in REASONS, f"no reason: {reason}"
        for name, number in (("tokens_generated", tokens), ("tokens_discarded", tokens), ("groups_discarded", 1)):
            self.count(name, number)
        self.count(f"rejected_{reason}")

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a total."""
        self.totals[name] += number

    def consume(self, collected: BatchRef, trained: Sequence[BatchRef], unused: Sequence[BatchRef]) -> None:
        """Counts the batch of a step, and what became of it.

        Groups among `trained` and `unused` that are not in `collected` were generated within the step. Raises
        `BatchError` if a group of `collected` is missing, or has another number of tokens than were generated.
        """
        entered, used, rest = tokens_of_groups([collected]), tokens_of_groups(trained), tokens_of_groups(unused)
        left = used + rest
        wrong = [uid for uid, tokens in entered.items() if left.get(uid) != tokens]
        if wrong:
            raise BatchError(
                f"{len(wrong)} of {len(entered)} groups were lost or changed between collect and observe: the group"
                f" with uid {wrong[0]} had {entered[wrong[0]]} tokens, and now has {left.get(wrong[0], 0)}.",
                remedy="Pass the rows that collect returned to self.observe, those that were not trained on as unused.",
            )
        self.totals["tokens_generated"] += sum((entered | left).values())
        self.totals["tokens_consumed"] += sum(used.values())
        self.totals["tokens_discarded"] += sum(rest.values())
        self.totals["groups_consumed"] += len(used)
        self.totals["groups_discarded"] += len(rest)
        counted = self.totals["tokens_consumed"] + self.totals["tokens_discarded"]
        assert self.totals["tokens_generated"] == counted, f"tokens were lost: {self.totals}"

    def staleness(self, trained: Sequence[BatchRef], *, version: int, largest: int) -> Metrics:
        """`async/staleness/*`, weighted by tokens: `version` minus the version of the oldest token of each response.

        `version` is that of the weights that the step trains. Raises `AssertionError` if a response is more than
        `largest` versions old.
        """
        stale = version - torch.cat([batch.row("weight_version") for batch in trained])
        tokens = torch.cat([batch.tokens_of("response_ids") for batch in trained])
        found = int(stale.max()) if len(stale) else 0
        assert found <= largest, f"a response is {found} versions old, above asynchrony.max_staleness={largest}"
        return {f"async/staleness/{name}": last(value) for name, value in weighted(stale, tokens).items()}

    def metrics(self, states: Mapping[str, int]) -> Metrics:
        """`async/groups/*`, `async/rejected/*` and `async/tokens/*`.

        `states` counts the groups of the queue by state.
        """
        found = {_METRICS[name]: last(value) for name, value in self.totals.items()}
        return found | {f"async/groups/{name}": last(states.get(name, 0)) for name in ("waiting", "running", "done")}


def weighted(values: Tensor, weights: Tensor) -> dict[str, float]:
    """Mean, maximum and 95th percentile of values [B] that count `weights` [B] times each."""
    total = int(weights.sum())
    if total == 0:
        return {"mean": 0.0, "max": 0.0, "p95": 0.0}
    order = values.argsort(stable=True)
    reached = weights[order].cumsum(0)
    p95 = values[order][int((reached < 0.95 * total).sum())]
    mean = float((values * weights).sum()) / total
    return {"mean": mean, "max": float(values[weights > 0].max()), "p95": float(p95)}


def tokens_of_groups(batches: Sequence[BatchRef]) -> Counter[int]:
    """Response tokens of each group."""
    found: Counter[int] = Counter()
    for batch in batches:
        for uid, tokens in zip(batch.row("uid").tolist(), batch.tokens_of("response_ids").tolist(), strict=True):
            found[uid] += tokens
    return found
