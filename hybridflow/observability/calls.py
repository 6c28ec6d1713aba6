"""Calls as they ran on every rank, with what they waited for: idle pools, and the critical path of a step."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

_CLOCK_SECONDS = 1e-6
"""Resolution of recorded times."""


class Span(NamedTuple):
    """One call on one rank."""

    call: int
    """The number of the call, in the driver's order; the same on all ranks."""

    role: str
    method: str
    pool: str
    rank: int
    start: float
    """Seconds since the epoch, on the driver's clock."""

    seconds: float
    bytes_in: int
    """Bytes of the tensors in the batches that it was given."""

    bytes_out: int
    """Bytes of the tensors in the columns that it added."""

    rows: int
    tokens: int
    """Generated tokens; for calls that generate none, tokens of the batch that it was given."""

    peak_bytes: int
    """The most memory that its process has taken by its end; 0 if it is not known."""

    answers: bool
    """Whether its answer counts. The rows of ranks that do not answer are also those of one that does."""

    needs: tuple[int, ...]
    """Calls whose columns the call took, or whose answers the driver had read before it."""

    waited_seconds: float = 0.0
    """How long it waited, at its beginning, for the other side of a transfer of weights between two pools."""

    @property
    def name(self) -> str:
        """`actor.update`, as a dataflow writes it."""
        return f"{self.role}.{self.method}"

    @property
    def work_start(self) -> float:
        """When its wait ended, in seconds since the epoch."""
        return self.start + self.waited_seconds

    @property
    def end(self) -> float:
        """Seconds since the epoch."""
        return self.start + self.seconds


@dataclass(frozen=True)
class CallTotal:
    """The calls of one name in a section: seconds of the slowest rank, and sums over the ranks.

    Seconds waited for another pool do not count. Rows, tokens and `bytes_out` are those of the ranks that answer.
    """

    seconds: float
    rows: float
    tokens: float
    bytes_in: float
    bytes_out: float


@dataclass(frozen=True)
class Section:
    """The calls of one training step, evaluation or checkpoint, in the driver's order, and its duration on the driver.

    `pools` are the number of ranks of every pool, also of pools that were not called.
    """

    what: str
    step: int
    start: float
    seconds: float
    spans: Sequence[Span]
    pools: Mapping[str, int]

    def totals(self) -> dict[tuple[str, str], CallTotal]:
        """The calls by role and method, in the order in which they were first made."""
        named: dict[tuple[str, str], list[Span]] = {}
        for span in self.spans:
            named.setdefault((span.role, span.method), []).append(span)
        return {name: _total(spans) for name, spans in named.items()}

    def idle_fractions(self) -> dict[str, float]:
        """For each pool, the fraction of the section's duration in which none of its ranks runs a call.

        A call that waits for another pool does not run.
        """
        return dict(self._idle_fractions)

    @cached_property
    def _idle_fractions(self) -> dict[str, float]:
        fractions = {}
        for pool in self.pools:
            busy, reached = 0.0, self.start
            for span in sorted((span for span in self.spans if span.pool == pool), key=lambda span: span.work_start):
                end = min(span.end, self.start + self.seconds)
                busy += max(0.0, end - max(span.work_start, reached))
                reached = max(reached, end)
            fractions[pool] = 1.0 - busy / self.seconds if self.seconds > 0.0 else 1.0
        return fractions

    def critical_path(self) -> list[Span]:
        """The chain of spans that depend on one another with the longest total duration.

        A span depends on the one before it in its process, and on those spans of the calls that its own call needs that
        ended before its work began. No two spans of a chain overlap, so it is never longer than the section.
        """
        return list(self._critical_path)

    @cached_property
    def _critical_path(self) -> list[Span]:
        best = _NOTHING
        ended: dict[int, _Ended] = {}
        last: dict[tuple[str, int], _Reached] = {}
        for number, spans in _by_call(self.spans).items():
            found = []
            for span in spans:
                process = (span.pool, span.rank)
                longest = last.get(process, _NOTHING)
                for needed in span.needs:
                    if needed in ended:
                        before = ended[needed].by(span.work_start + _CLOCK_SECONDS)
                        longest = before if before.seconds > longest.seconds else longest
                seconds = self.seconds_within(span)
                reached = _Reached(longest.seconds + seconds, span, longest) if seconds else longest
                last[process] = reached
                found.append((span.end, reached))
                best = reached if reached.seconds > best.seconds else best
            ended[number] = _Ended.of(found)
        return best.path()

    def seconds_within(self, span: Span) -> float:
        """The part of a span's work that lies within the section; a call may be left over from the previous one."""
        return max(0.0, min(span.end, self.start + self.seconds) - max(span.work_start, self.start))


@dataclass(frozen=True, slots=True)
class _Reached:
    """The end of a chain of spans, and its total duration."""

    seconds: float = 0.0
    span: Span | None = None
    before: "_Reached | None" = None

    def path(self) -> list[Span]:
        found, reached = [], self
        while reached is not None and reached.span is not None:
            found.append(reached.span)
            reached = reached.before
        return found[::-1]


_NOTHING = _Reached()


@dataclass(frozen=True, slots=True)
class _Ended:
    """When the spans of a call ended, in order, and the longest of the chains that had ended by then."""

    ends: list[float]
    longest: list[_Reached]

    @staticmethod
    def of(chains: Iterable[tuple[float, _Reached]]) -> "_Ended":
        found, best = _Ended([], []), _NOTHING
        for end, reached in sorted(chains, key=lambda chain: chain[0]):
            best = reached if reached.seconds > best.seconds else best
            found.ends.append(end)
            found.longest.append(best)
        return found

    def by(self, time: float) -> _Reached:
        """The longest chain that had ended by a time."""
        place = bisect_right(self.ends, time)
        return self.longest[place - 1] if place else _NOTHING


def medians(sections: Iterable[Section]) -> dict[str, CallTotal]:
    """The median total of each call's name, over the sections that have it."""
    named: dict[str, list[CallTotal]] = {}
    for section in sections:
        for (role, method), total in section.totals().items():
            named.setdefault(f"{role}.{method}", []).append(total)
    return {
        name: CallTotal(
            median(total.seconds for total in totals),
            median(total.rows for total in totals),
            median(total.tokens for total in totals),
            median(total.bytes_in for total in totals),
            median(total.bytes_out for total in totals),
        )
        for name, totals in named.items()
    }


def _total(spans: Sequence[Span]) -> CallTotal:
    seconds: dict[tuple[str, int], float] = {}
    for span in spans:
        seconds[span.pool, span.rank] = seconds.get((span.pool, span.rank), 0.0) + span.seconds - span.waited_seconds
    answering = [span for span in spans if span.answers]
    return CallTotal(
        max(seconds.values()),
        sum(span.rows for span in answering),
        sum(span.tokens for span in answering),
        sum(span.bytes_in for span in spans),
        sum(span.bytes_out for span in answering),
    )


def _by_call(spans: Iterable[Span]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.call):
        found.setdefault(span.call, []).append(span)
    return found
