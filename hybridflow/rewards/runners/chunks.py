"""Samples in chunks, and the progress of a run over them: what is left to score, what failed, and the results."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hybridflow.observability.metrics import Metrics, merge
from hybridflow.rewards.bound import BoundReward, failure
from hybridflow.rewards.interface import Failure, Outcome, Samples
from hybridflow.rewards.runners.serial import ONLY_TOGETHER

logger = logging.getLogger(__name__)

CHUNK_SAMPLES = 8
"""A chunk has at least as many samples, and whole groups of one prompt."""

MOST_CHUNKS = 256
"""Of a function that takes one sample per call; more messages would cost noticeable time in a step."""


@dataclass(frozen=True)
class Chunk:
    """Samples `start` up to `stop` for one function; `whole` is the failed chunk of which this retries one sample."""

    function: int
    start: int
    stop: int
    whole: "Chunk | None" = None

    def __len__(self) -> int:
        return self.stop - self.start


def chunks_of(index: int, function: BoundReward, samples: Samples) -> list[Chunk]:
    """The samples of one function in order, cut only between prompts, since functions may compare responses to one.

    A function that takes one sample per call gets small chunks, mostly of one; an asynchronous one gets all samples at
    once, since it waits for them concurrently.
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
    """A failed chunk whose samples are retried one by one: how many are left, and whether any failed again."""

    reason: str
    trace: str
    by_raising: bool
    left: int
    has_failed: bool = False


@dataclass
class _Result:
    """The results of one function so far."""

    scores: list[float | None]
    failures: list[Failure] = field(default_factory=list)
    metrics: list[Metrics] = field(default_factory=list)
    extras: dict[str, list] = field(default_factory=dict)


class Progress:
    """The chunks that are left and the results so far, over all functions of one run."""

    def __init__(self, functions: Sequence[BoundReward], samples: Samples, allowed_failures: int) -> None:
        self._functions = functions
        self._samples = samples
        self._allowed = allowed_failures
        self._queue: deque[Chunk] = deque()
        self._retries: dict[Chunk, _Retry] = {}
        self._results = [_Result([None] * len(samples)) for _ in functions]

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Adds chunks to the queue."""
        self._queue.extend(chunks)

    def has_more(self) -> bool:
        """Whether any chunk is left in the queue."""
        while self._queue and not self.is_needed(self._queue[0]):
            self._queue.popleft()
        return bool(self._queue)

    def next_chunk(self) -> Chunk | None:
        """Takes the next chunk from the queue, if there is one."""
        return self._queue.popleft() if self.has_more() else None

    def is_needed(self, chunk: Chunk) -> bool:
        """Whether a chunk can still matter: not if it comes after one failure too many of its function."""
        failed = sorted({found.index for found in self._results[chunk.function].failures})
        return len(failed) <= self._allowed or chunk.start < failed[self._allowed]

    def succeeded(self, chunk: Chunk, outcome: Outcome) -> None:
        """Records the outcome of a chunk."""
        result = self._results[chunk.function]
        result.scores[chunk.start : chunk.stop] = outcome.scores
        for found in outcome.failures:
            result.failures.append(replace(found, index=found.index + chunk.start))
        if chunk.whole is None:
            result.metrics.append(outcome.metrics)
            for name, values in outcome.extras.items():
                result.extras.setdefault(name, [None] * len(self._samples))[chunk.start : chunk.stop] = values
        self._retried(chunk, has_failed=bool(outcome.failures))

    def failed(
        self, chunk: Chunk, reason: str, trace: str = "", *, by_raising: bool = False, for_all: bool = False
    ) -> None:
        """Records that a chunk failed: its samples are retried one by one, unless it has one or all fail `for_all`."""
        if len(chunk) == 1 or for_all:
            for row in range(chunk.start, chunk.stop):
                self._fail(chunk.function, row, reason, trace)
            self._retried(chunk, has_failed=True)
            return
        label = self._functions[chunk.function].label
        logger.warning("reward=%s samples=%d are scored one by one: %s", label, len(chunk), reason)
        self._retries[chunk] = _Retry(reason, trace, by_raising, left=len(chunk))
        alone = [Chunk(chunk.function, row, row + 1, whole=chunk) for row in range(chunk.start, chunk.stop)]
        self._queue.extendleft(reversed(alone))

    def outcomes(self) -> list[Outcome]:
        """One outcome per function."""
        return [
            Outcome(result.scores, sorted(result.failures, key=lambda f: f.index), merge(result.metrics), result.extras)
            for result in self._results
        ]

    def _retried(self, chunk: Chunk, *, has_failed: bool) -> None:
        """After the last retry of a chunk that raised, all its samples fail if none raised alone."""
        if chunk.whole is None:
            return
        retry = self._retries[chunk.whole]
        retry.left -= 1
        retry.has_failed |= has_failed
        if retry.left == 0 and retry.by_raising and not retry.has_failed:
            for row in range(chunk.whole.start, chunk.whole.stop):
                self._results[chunk.function].scores[row] = None
                self._fail(chunk.function, row, f"{retry.reason} {ONLY_TOGETHER}", retry.trace)

    def _fail(self, function: int, row: int, reason: str, trace: str) -> None:
        self._results[function].failures.append(failure(self._functions[function], self._samples, row, reason, trace))
