"""How many responses an engine generates at once, from the first decoding step to the last."""

from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush

import numpy as np

_GROUPS = 256
"""At most this many groups of rows are followed at a time; the rows of a group have the same length."""

_MOST_QUEUED = 64 * _GROUPS
"""At most this many groups are followed through a queue; an engine with more is in a steady state for the rest."""

_STRIDE = 0.6180339887498949
"""Rows arrive in an order without pattern: row i has the quantile at the fractional part of i times this."""


@dataclass(frozen=True)
class DecodingRuns:
    """Runs of decoding steps with a constant number of responses, in order."""

    steps: np.ndarray
    """Steps of each run."""

    sequences: np.ndarray
    """Responses in each step of the run."""

    generated: np.ndarray
    """Tokens that these responses have generated before a step, summed over them, on average over the run."""


@lru_cache(maxsize=1024)
def decoding_runs(lengths: tuple[float, ...], rows: float, limit: float) -> DecodingRuns:
    """The decoding steps of an engine that generates `rows` responses, at most `limit` at a time.

    A response starts as soon as another one has ended (continuous batching). `lengths` are equally probable quantiles
    of tokens per response; the engine with the longest response is followed, since a step waits for it.
    """
    rows, limit = max(rows, 1.0), max(limit, 1.0)
    groups = min(round(rows), _GROUPS)
    if limit >= rows:
        return _without_queue(np.sort(_sampled(lengths, groups)), rows / groups)
    concurrent = min(int(limit), _GROUPS)
    weight = limit / concurrent
    count = max(concurrent, round(min(rows / weight, _MOST_QUEUED)))
    runs = _with_queue(_in_arrival_order(lengths, count), concurrent, weight)
    if rows / weight <= _MOST_QUEUED:
        return runs
    steps = (rows - count * weight) * sum(lengths) / len(lengths) / limit
    more = steps, limit, limit * length_in_flight(lengths)
    columns = zip((runs.steps, runs.sequences, runs.generated), more, strict=True)
    return DecodingRuns(*(np.append(column, number) for column, number in columns))


@lru_cache(maxsize=1024)
def steady(lengths: tuple[float, ...], rows: float, limit: float, batches: float) -> DecodingRuns:
    """The steps between two batches of `rows` responses, if an engine always has up to `batches` of them in flight.

    A batch needs its tokens, and its longest response takes no longer than `batches` of these intervals.
    """
    sequences = max(1.0, min(limit, batches * max(rows, 1.0)))
    mean = sum(lengths) / len(lengths)
    steps = max(max(rows, 1.0) * mean / sequences, lengths[-1] / batches)
    sequences = max(rows, 1.0) * mean / steps
    return DecodingRuns(np.array([steps]), np.array([sequences]), np.array([sequences * length_in_flight(lengths)]))


@lru_cache(maxsize=256)
def length_in_flight(lengths: tuple[float, ...]) -> float:
    """Mean tokens so far of the responses in flight at a moment of continuous generation: E[L^2] / (2 E[L])."""
    return sum(length * length for length in lengths) / (2 * max(sum(lengths), 1e-9))


def _sampled(lengths: tuple[float, ...], count: int) -> np.ndarray:
    """`count` of the quantiles, the longest among them."""
    if count % len(lengths) == 0:
        return np.repeat(lengths, count // len(lengths)).astype(float)
    positions = ((np.arange(count) + 0.5) * len(lengths) / count).astype(int)
    chosen = np.asarray(lengths, dtype=float)[positions]
    chosen[-1] = lengths[-1]
    return chosen


def _in_arrival_order(lengths: tuple[float, ...], count: int) -> np.ndarray:
    order = np.argsort((np.arange(count) * _STRIDE) % 1.0, kind="stable")
    arrived = np.empty(count)
    arrived[order] = _sampled(lengths, count)
    return arrived


def _without_queue(lengths: np.ndarray, weight: float) -> DecodingRuns:
    """All start together; `lengths` are sorted."""
    ends = np.unique(lengths)
    starts = np.concatenate([[0.0], ends[:-1]])
    alive = (len(lengths) - np.searchsorted(lengths, starts, side="right")) * weight
    steps = ends - starts
    return DecodingRuns(steps, alive, alive * (starts + (steps - 1) / 2))


def _with_queue(lengths: np.ndarray, concurrent: int, weight: float) -> DecodingRuns:
    """Each ending response makes room for the next in the queue."""
    running: list[tuple[float, float]] = []
    for length in lengths[:concurrent]:
        heappush(running, (float(length), float(length)))
    waiting = iter(lengths[concurrent:].tolist())
    now, generated = 0.0, 0.0
    runs: list[tuple[float, float, float]] = []
    while running:
        end, length = heappop(running)
        if end > now:
            steps, sequences = end - now, len(running) + 1
            runs.append((steps, sequences, generated + sequences * (steps - 1) / 2))
            generated += sequences * steps
            now = end
        generated -= length
        following = next(waiting, None)
        if following is not None:
            heappush(running, (now + following, following))
    steps, sequences, tokens = np.array(runs).T
    return DecodingRuns(steps, sequences * weight, tokens * weight)
