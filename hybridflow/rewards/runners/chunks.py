"""Samples in chunks, and the board that says which are still to be scored, which failed, and what came of all."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hybridflow.observability.metrics import Metrics, merge
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.interface import Failure, Outcome, Samples
from hybridflow.rewards.outcomes import failure, indices_of
from hybridflow.rewards.runners.serial import ONLY_TOGETHER

logger = logging.getLogger(__name__)

CHUNK_SAMPLES = 8
"""A chunk holds whole groups of one prompt, and ends with the group that fills it."""

MOST_CHUNKS = 256
"""Of a function that is called with a sample at a time, so that messages stay cheap beside a step."""


@dataclass(frozen=True)
class Chunk:
    """Samples `start` up to `stop` for one function; `whole` is the chunk that failed, where this is a sample of it."""

    function: int
    start: int
    stop: int
    whole: "Chunk | None" = None

    def __len__(self) -> int:
        return self.stop - self.start


def chunks_of(index: int, function: BoundReward, samples: Samples) -> list[Chunk]:
    """The samples of one function in order, cut only where the prompt changes, as functions may compare siblings.

    One that is called with a sample at a time is given few at a time, mostly one; an asynchronous one gets all, for it
    waits for all of them at once.
    """
    if function.is_async:
        size = len(samples)
    else:
        size = -(-len(samples) // MOST_CHUNKS) if function.dialect.is_each else CHUNK_SAMPLES
    cuts = [0]
    for row in range(1, len(samples)):
        same = samples.prompts[row] == samples.prompts[row - 1] and not function.dialect.is_each
        if row - cuts[-1] >= size and not same:
            cuts.append(row)
    return [
        Chunk(index, start, stop) for start, stop in zip(cuts, [*cuts[1:], len(samples)], strict=True) if stop > start
    ]


@dataclass
class _Retry:
    """The samples of a chunk that failed, each by itself: how many are out, and whether any failed again."""

    reason: str
    trace: str
    by_raising: bool
    left: int
    has_failed: bool = False


@dataclass
class _Tally:
    """What is known of one function's samples."""

    scores: list[float | None]
    failures: list[Failure] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    extras: dict[str, list] = field(default_factory=dict)


class Board:
    """What is to be done and what was found, over all functions of one run."""

    def __init__(self, functions: Sequence[BoundReward], samples: Samples, allowed_failures: int) -> None:
        self._functions = functions
        self._samples = samples
        self._allowed = allowed_failures
        self._queue: deque[Chunk] = deque()
        self._retries: dict[Chunk, _Retry] = {}
        self._tallies = [_Tally([None] * len(samples)) for _ in functions]

    def add(self, chunks: Iterable[Chunk]) -> None:
        """More chunks to do."""
        self._queue.extend(chunks)

    def has_more(self) -> bool:
        """Whether any chunk is left to be given out."""
        while self._queue and not self.is_wanted(self._queue[0]):
            self._queue.popleft()
        return bool(self._queue)

    def next_chunk(self) -> Chunk | None:
        """The next chunk to do, if there is one."""
        return self._queue.popleft() if self.has_more() else None

    def is_wanted(self, chunk: Chunk) -> bool:
        """Whether a chunk still matters: it does not behind the failure of its function that is one too many."""
        failed = indices_of(self._tallies[chunk.function].failures)
        return len(failed) <= self._allowed or chunk.start < failed[self._allowed]

    def answered(self, chunk: Chunk, outcome: Outcome) -> None:
        """A chunk was scored."""
        tally = self._tallies[chunk.function]
        tally.scores[chunk.start : chunk.stop] = outcome.scores
        for found in outcome.failures:
            tally.failures.append(replace(found, index=found.index + chunk.start))
        if chunk.whole is None:
            tally.metrics.append(outcome.metrics)
            for name, values in outcome.extras.items():
                tally.extras.setdefault(name, [None] * len(self._samples))[chunk.start : chunk.stop] = values
        self._alone_is_done(chunk, has_failed=bool(outcome.failures))

    def failed(
        self, chunk: Chunk, reason: str, trace: str = "", *, by_raising: bool = False, of_all: bool = False
    ) -> None:
        """A chunk was not scored: its samples are tried one by one, and a sample alone has failed.

        `of_all`: each has failed, for a reason that is none of theirs.
        """
        if of_all and len(chunk) > 1:
            for row in range(chunk.start, chunk.stop):
                self._fail(chunk.function, row, reason, trace)
            return
        if len(chunk) == 1:
            self._fail(chunk.function, chunk.start, reason, trace)
            self._alone_is_done(chunk, has_failed=True)
            return
        label = self._functions[chunk.function].label
        logger.warning("reward=%s samples=%d are scored one by one: %s", label, len(chunk), reason)
        self._retries[chunk] = _Retry(reason, trace, by_raising, left=len(chunk))
        alone = [Chunk(chunk.function, row, row + 1, whole=chunk) for row in range(chunk.start, chunk.stop)]
        self._queue.extendleft(reversed(alone))

    def outcomes(self) -> list[Outcome]:
        """One outcome a function."""
        return [
            Outcome(tally.scores, sorted(tally.failures, key=lambda f: f.index), merge(tally.metrics), tally.extras)
            for tally in self._tallies
        ]

    def _alone_is_done(self, chunk: Chunk, *, has_failed: bool) -> None:
        retry = self._retries.get(chunk.whole) if chunk.whole is not None else None
        if chunk.whole is None or retry is None:
            return
        retry.left -= 1
        retry.has_failed |= has_failed
        if retry.left == 0 and retry.by_raising and not retry.has_failed:
            for row in range(chunk.whole.start, chunk.whole.stop):
                self._tallies[chunk.function].scores[row] = None
                self._fail(chunk.function, row, f"{retry.reason} {ONLY_TOGETHER}", retry.trace)

    def _fail(self, function: int, row: int, reason: str, trace: str) -> None:
        self._tallies[function].failures.append(failure(self._functions[function], self._samples, row, reason, trace))
