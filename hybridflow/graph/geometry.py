"""The positions of a drawing's boxes and wires: one row per role, one column per time, wires in lanes between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from hybridflow.graph.trace import DRIVER, Trace, TracedCall

LINE = 14.0
CHARACTER = 6.62
"""Width of one character of the monospaced text of a box."""

LEAST_ROW_HEIGHT = 76.0
"""Height of a row that a role's label needs, next to its boxes."""

_LETTERS_A_LINE = 20
_TITLE_CHARACTER = 7.3
_PAD, _TITLE_HEIGHT, _DOT = 10.0, 24.0, 14.0
_LANE, _TRACK, _MARGIN = 9.0, 8.0, 14.0
_LEFT, _TOP, _POOL_HEADING, _ROW_GAP, _POOL_GAP = 168.0, 104.0, 26.0, 14.0, 16.0


@dataclass(frozen=True)
class Line:
    """One line of text in a box, and the maker whose wire ends there, if any."""

    text: str
    kind: str
    """takes, data, adds or after."""

    maker: int | None = None


@dataclass(frozen=True)
class Box:
    """One call."""

    call: TracedCall
    lines: tuple[Line, ...]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Wire:
    """Columns sent to a call, as corners of a line."""

    maker: int
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Band:
    """A pool: a strip over the rows of its roles; `rows` are the roles' names and the tops of their boxes."""

    pool: str
    y: float
    height: float
    rows: Mapping[str, float]


@dataclass(frozen=True)
class Layout:
    """Everything placed."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    bands: tuple[Band, ...]
    times: Mapping[int, float]
    """The middle of each time's column."""


def laid_out(trace: Trace) -> Layout:
    """Places rows first, then the wires' lanes, then the columns."""
    lines = {call.number: tuple(_lines(call, trace)) for call in trace.calls}
    rows = _Rows(trace, lines)
    gutters = _Gutters(trace, rows)
    last = max((call.time for call in trace.calls), default=0)
    columns, x = {}, _LEFT
    for time in range(1, last + 1):
        width = max(_width(call, lines[call.number]) for call in trace.calls if call.time == time)
        columns[time] = (x, width)
        x += width + gutters.width(time)
    boxes = []
    for call in trace.calls:
        own, (left, width) = lines[call.number], columns[call.time]
        boxes.append(Box(call, own, left, rows.box_y(call.number), width, _height(own)))
    ends = {time: left + width for time, (left, width) in columns.items()}
    wires = tuple(gutters.wires(boxes, ends))
    times = {time: left + width / 2 for time, (left, width) in columns.items()}
    return Layout(max(x + 4, 620.0), rows.bottom, tuple(boxes), wires, tuple(rows.bands), times)


def line_y(top: float, index: int) -> float:
    """The middle of a line of text in a box whose upper edge is at `top`."""
    return top + _TITLE_HEIGHT + LINE * (index + 0.5)


def _lines(call: TracedCall, trace: Trace) -> list[Line]:
    found = []
    for maker, names in call.takes.items():
        if maker == DRIVER:
            given = [name for name in names if name in trace.data]
            made = [name for name in names if name not in trace.data]
            parts = [("data", "the data" if call.takes_all else " ".join(given))] if given else []
            parts += [("data", f"{' '.join(made)} (driver)")] if made else []
        else:
            parts = [("takes", "everything" if call.takes_all else " ".join(names))]
        for kind, text in parts:
            first, *rest = wrap(text, _LETTERS_A_LINE, break_long_words=False, break_on_hyphens=False)
            found += [Line(first, kind, maker), *(Line(text, kind) for text in rest)]
    if call.adds:
        for number, text in enumerate(wrap(" ".join(call.adds), _LETTERS_A_LINE, break_long_words=False)):
            found.append(Line(f"{' ' if number else '+'} {text}", "adds"))
    if call.after:
        names = [trace.calls[number - 1].name for number in call.after]
        found += [Line(f"{' ' if n else 'after'} {name}".strip(), "after") for n, name in enumerate(names)]
    return found


def _width(call: TracedCall, lines: Sequence[Line]) -> float:
    letters = max((len(line.text) for line in lines), default=0)
    title = (len(call.name) + len(str(call.number)) + 1) * _TITLE_CHARACTER
    return 2 * _PAD + max(title, _DOT + letters * CHARACTER)


def _height(lines: Sequence[Line]) -> float:
    return _TITLE_HEIGHT + LINE * len(lines) + (_PAD * 0.8 if lines else 4.0)


class _Rows:
    """The rows of roles from top to bottom, in bands of pools, each with tracks for wires above its boxes."""

    def __init__(self, trace: Trace, lines: Mapping[int, Sequence[Line]]) -> None:
        self.calls = {call.number: call for call in trace.calls}
        self.lines = lines
        self.bands: list[Band] = []
        self._tracks: dict[tuple[str, int], float] = {}
        self._tops: dict[str, float] = {}
        y = _TOP
        pools = {call.role: call.pool for call in trace.calls}
        for pool in dict.fromkeys(pools.values()):
            start, tops = y, {}
            y += _POOL_HEADING
            for role in (name for name in pools if pools[name] == pool):
                own = [call for call in trace.calls if call.role == role]
                for maker in sorted({m for call in own for m in _far_makers(call, self.calls)}):
                    self._tracks[role, maker] = y
                    y += _TRACK
                self._tops[role] = y + 2
                tops[role] = self._tops[role]
                y += max(LEAST_ROW_HEIGHT, *(_height(lines[call.number]) for call in own)) + _ROW_GAP
            self.bands.append(Band(pool, start, y - start, tops))
            y += _POOL_GAP
        self.bottom = y

    def box_y(self, number: int) -> float:
        """The top of a call's box."""
        return self._tops[self.calls[number].role]

    def out_y(self, number: int) -> float:
        """The point where a call's wires leave it."""
        return self.box_y(number) + _TITLE_HEIGHT / 2

    def port_y(self, number: int, maker: int) -> float:
        """The point where a call's wire from a maker arrives."""
        index = next(i for i, line in enumerate(self.lines[number]) if line.maker == maker)
        return line_y(self.box_y(number), index)

    def track_y(self, number: int, maker: int) -> float:
        """The track of a maker's wires above the row of a call."""
        return self._tracks[self.calls[number].role, maker]


def _makers(call: TracedCall) -> list[int]:
    return [maker for maker in call.takes if maker != DRIVER]


def _far_makers(call: TracedCall, calls: Mapping[int, TracedCall]) -> list[int]:
    """Makers that are more than one time back: their wires pass over other boxes of the row."""
    return [maker for maker in _makers(call) if call.time - calls[maker].time > 1]


class _Gutters:
    """The vertical lanes between one time and the next: a trunk a maker, and a drop for each wire from far off."""

    def __init__(self, trace: Trace, rows: _Rows) -> None:
        self._rows = rows
        self._calls = rows.calls
        self._edges = [(maker, call.number) for call in trace.calls for maker in _makers(call)]
        spans: dict[tuple[int, int | None], tuple[int, float, float]] = {}
        for maker, number in self._edges:
            is_far = maker in _far_makers(self._calls[number], self._calls)
            port = rows.port_y(number, maker)
            end = rows.track_y(number, maker) if is_far else port
            time, low, high = spans.get((maker, None), (self._calls[maker].time, rows.out_y(maker), rows.out_y(maker)))
            spans[maker, None] = (time, min(low, end), max(high, end))
            if is_far:
                spans[maker, number] = (self._calls[number].time - 1, min(end, port), max(end, port))
        self._lanes: dict[tuple[int, int | None], int] = {}
        self._counts: dict[int, int] = {}
        for time in {span[0] for span in spans.values()}:
            here = {key: span[1:] for key, span in spans.items() if span[0] == time}
            self._counts[time] = self._packed(here)

    def width(self, time: int) -> float:
        """Room after a time's column."""
        return 2 * _MARGIN + _LANE * max(self._counts.get(time, 0) - 1, 0)

    def wires(self, boxes: Sequence[Box], ends: Mapping[int, float]) -> list[Wire]:
        """The corners of every wire."""
        of_number = {box.call.number: box for box in boxes}
        found = []
        for maker, number in self._edges:
            source, target = of_number[maker], of_number[number]
            start, port = self._rows.out_y(maker), self._rows.port_y(number, maker)
            trunk = self._x((maker, None), source.call.time, ends)
            points = [(source.x + source.width, start), (trunk, start)]
            if (maker, number) in self._lanes:
                track = self._rows.track_y(number, maker)
                drop = self._x((maker, number), target.call.time - 1, ends)
                points += [(trunk, track), (drop, track), (drop, port)]
            else:
                points += [(trunk, port)]
            found.append(Wire(maker, (*points, (target.x, port))))
        return found

    def _x(self, key: tuple[int, int | None], time: int, ends: Mapping[int, float]) -> float:
        return ends[time] + _MARGIN + _LANE * self._lanes[key]

    def _packed(self, spans: Mapping[tuple[int, int | None], tuple[float, float]]) -> int:
        """Gives each vertical the first lane in which it overlaps nothing; returns the number of lanes."""
        free: list[float] = []
        for key, (low, high) in sorted(spans.items(), key=lambda item: (item[1], item[0][0])):
            lane = next((n for n, end in enumerate(free) if end + 6 < low), len(free))
            free[lane : lane + 1] = [high]
            self._lanes[key] = lane
        return len(free)
