"""Settings of asynchronous training: how far generation runs ahead, and how old the samples of an update may be."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_0, AT_LEAST_1
from hybridflow.config.section import Section
from hybridflow.errors import ConfigError


class WhenStale(Enum):
    """How a group that would exceed `asynchrony.max_staleness` is handled."""

    wait = "wait"
    drop = "drop"
    mask = "mask"


class OnDeadline(Enum):
    """How a group that misses its deadline is handled."""

    truncate = "truncate"
    replace = "replace"


@dataclass
class Asynchrony(Section):
    """Generating ahead: while a batch is trained on, the rollout already generates later ones, with older weights."""

    max_staleness: Annotated[int, AT_LEAST_0] = 0
    """Largest number of weight publications between the weights that sampled a token and the weights that the token
    updates; time in the queue counts. 0: synchronous; each batch is generated with the weights that it updates."""

    ahead: Annotated[int, AT_LEAST_1] = 1
    """Number of batches that are generated before the step that trains on them, at most `max_staleness`. More than 1
    only helps if generation times vary from batch to batch. Without partial_rollouts, samples are exactly `ahead`
    versions old, so raise both numbers together."""

    partial_rollouts: bool = False
    """Groups (a prompt and its samples) that finish first are scored and trained on first, and the others continue with
    the new weights; with max_staleness=0, a step waits for all of its groups. DAPO and `filter_out` replace groups one
    by one, so they train on other prompts than with whole batches. false: a step waits for its whole batch,
    which is generated with the same weights."""

    when_stale: WhenStale = WhenStale.wait
    """With partial_rollouts, `wait`: a step waits for groups that would be too old for the next one. `drop`: groups
    that are too old are discarded, and others begin in their place. `mask`: tokens that are too old are left out of the
    loss."""

    deadline_tokens: Annotated[int | None, AT_LEAST_1] = None
    """With partial_rollouts: decoding steps after which `on_deadline` applies to a group that has not finished.
    None: no limit except data.max_response_tokens."""

    on_deadline: OnDeadline = OnDeadline.truncate
    """`truncate`: the group is trained on with the tokens that it has, as if they had reached the length limit.
    `replace`: it is discarded, and another one begins in its place."""

    replay: str | None = None
    """With partial_rollouts: directory of a run whose schedule is repeated, so that this run, with the same settings,
    gives the same samples and metrics."""

    @property
    def depth(self) -> int:
        """Batches that are generated ahead: a batch is asked for only when it can still be trained on."""
        return min(self.ahead, self.max_staleness)


def asynchrony_errors(settings: Asynchrony) -> Iterator[ConfigError]:
    """No batch can be generated further ahead than its samples may be old."""
    ahead, staleness = settings.ahead, settings.max_staleness
    if 0 < staleness < ahead:
        yield ConfigError(
            f"asynchrony.ahead={ahead} is above asynchrony.max_staleness={staleness}: a batch that is generated {ahead}"
            f" steps ahead would be {ahead} versions old.",
            remedy=f"Use asynchrony.ahead={staleness}, or asynchrony.max_staleness={ahead}.",
            key="asynchrony.ahead",
            among=["asynchrony.ahead", "asynchrony.max_staleness"],
        )
