"""Samples in chunks, and the progress of a run over them: remaining chunks, failures, and results."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybridflow.observability.metrics import Metrics, merge
from hybridflow.rewards.bound import BoundReward, failure
from hybridflow.rewards.interface import Outcome, Samples

logger = logging.getLogger(__name__)

CHUNK_SAMPLES = 8
"""A chunk has at least as many samples, and whole groups of one prompt."""

MOST_CHUNKS = 256
"""For a function that takes one sample per call; more messages would cost noticeable time in a step."""


@dataclass(frozen=True)
class Chunk:
    """Samples `start` up to `stop` for one function; `is_retry`: one sample of a chunk that failed; `is_second`: a
    process that had them was killed before."""

    function: int
    start: int
    stop: int
    is_retry: bool = False
    is_second: bool = False

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


class Progress:
    """The chunks that are left and the results so far, over all functions of one run."""

    def __init__(self, functions: Sequence[BoundReward], samples: Samples, allowed_failures: int) -> None:
        self._functions = functions
        self._samples = samples
        self._allowed = allowed_failures
        self._queue: deque[Chunk] = deque()
        self._results = [Outcome([None] * len(samples)) for _ in functions]
        self._metrics: list[list[Metrics]] = [[] for _ in functions]

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
        if not chunk.is_retry:
            self._metrics[chunk.function].append(outcome.metrics)
            for name, values in outcome.extras.items():
                result.extras.setdefault(name, [None] * len(self._samples))[chunk.start : chunk.stop] = values

    def failed(self, chunk: Chunk, reason: str, *, is_from_outside: bool = False) -> None:
        """Records that the process of a chunk was lost: its samples are retried one by one, if there are several.

        `is_from_outside`: it was killed as the kernel or a person does; the first time, they are scored again.
        """
        function = self._functions[chunk.function]
        if is_from_outside and not chunk.is_second:
            logger.warning("reward=%s samples=%d are scored again: %s", function.label, len(chunk), reason)
            self._queue.appendleft(replace(chunk, is_second=True))
            return
        if len(chunk) == 1:
            failed = failure(function, self._samples, chunk.start, reason)
            self._results[chunk.function].failures.append(failed)
            return
        logger.warning("reward=%s samples=%d are scored one by one: %s", function.label, len(chunk), reason)
        rows = range(chunk.start, chunk.stop)
        alone = [replace(chunk, start=row, stop=row + 1, is_retry=True) for row in rows]
        self._queue.extendleft(reversed(alone))

    def outcomes(self) -> list[Outcome]:
        """One outcome per function."""
        return [
            replace(result, failures=sorted(result.failures, key=lambda failed: failed.index), metrics=merge(metrics))
            for result, metrics in zip(self._results, self._metrics, strict=True)
        ]
