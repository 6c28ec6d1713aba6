"""The driver's record of its calls: what each needed, and what its ranks measured."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from hybridflow.observability.calls import Span

Measured = Sequence[float]
"""Measurements of a call on a rank: start (seconds since the epoch, on its clock), seconds, bytes in and out, rows,
tokens, peak bytes, seconds waited; see `Span`."""


@dataclass
class _Call:
    role: str
    method: str
    pool: str
    needs: tuple[int, ...]
    answering: Collection[int]
    unanswered: int


@dataclass
class _Offset:
    """Bounds on what must be added to the clock of a node: no call starts before it is sent, nor ends after its answer
    is here."""

    least: float = float("-inf")
    most: float = float("inf")

    @property
    def seconds(self) -> float:
        """0 if that is possible, else the bound next to it."""
        return max(self.least, min(0.0, self.most))


@dataclass
class CallLog:
    """Calls in the driver's order. Ranks send what they measured together with their answers.

    Clocks of other nodes are corrected with bounds that the calls themselves give: a call cannot start before it is
    sent, nor end after its answer has arrived.
    """

    _begun: int = 0
    _calls: dict[int, _Call] = field(default_factory=dict)
    _read: set[int] = field(default_factory=set)
    """Calls whose answers the driver has read, without those that one of the others needs."""

    _answers: list[tuple[int, _Call, int, Measured, str, float, float]] = field(default_factory=list)
    """The answers since the last drain: the number of the call, the call, the rank, what it measured, its node, and
    when the call was sent and answered, on this process's clock."""

    def begin(
        self, role: str, method: str, pool: str, *, takes: Iterable[int], ranks: int, answering: Collection[int]
    ) -> int:
        """The number of a call that takes columns of some others."""
        self._begun += 1
        taken = set(takes)
        implied = {number for taken_from in taken & self._calls.keys() for number in self._calls[taken_from].needs}
        needs = tuple(sorted(taken | (self._read - implied)))
        self._calls[self._begun] = _Call(role, method, pool, needs, answering, ranks)
        return self._begun

    def read(self, numbers: Iterable[int]) -> None:
        """The driver has read the answers of some calls, so that all later calls come after them."""
        for number in set(numbers) - {0}:
            if number in self._calls:
                self._read.difference_update(self._calls[number].needs)
            self._read.add(number)

    def answered(self, number: int, rank: int, measured: Measured, *, node: str = "", sent: float, now: float) -> None:
        """A rank has answered a call that was sent at a time, both times on this process's clock."""
        if (call := self._calls.get(number)) is not None:
            call.unanswered -= 1
            self._answers.append((number, call, rank, measured, node, sent, now))

    def drop(self) -> None:
        """Forgets the calls that have not been answered: they never will be."""
        self._calls.clear()
        self._read.clear()

    def drain(self) -> list[Span]:
        """The calls answered since the last drain, by call and rank, on this process's clock."""
        offsets: dict[str, _Offset] = {}
        for _, _, _, (start, seconds, *_), node, sent, now in self._answers:
            offset = offsets.setdefault(node, _Offset())
            offset.least = max(offset.least, sent - start)
            offset.most = min(offset.most, now - start - seconds)
        seconds_of = {node: offset.seconds for node, offset in offsets.items()}
        spans: list[Span] = []
        for number, call, rank, measured, node, _, _ in self._answers:
            start, seconds, bytes_in, bytes_out, rows, tokens, peak_bytes, waited_seconds = measured
            span = Span(
                call=number,
                role=call.role,
                method=call.method,
                pool=call.pool,
                rank=rank,
                start=start + seconds_of[node],
                seconds=seconds,
                bytes_in=int(bytes_in),
                bytes_out=int(bytes_out),
                rows=int(rows),
                tokens=int(tokens),
                peak_bytes=int(peak_bytes),
                answers=rank in call.answering,
                needs=call.needs,
                waited_seconds=waited_seconds,
            )
            spans.append(span)
        self._answers.clear()
        self._calls = {number: call for number, call in self._calls.items() if call.unanswered}
        return sorted(spans, key=lambda span: (span.call, span.rank))
