"""Line charts as inline SVG; the page's script adds a crosshair with values."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.observability import formatting
from hybridflow.observability.fault_ledger import Fault
from hybridflow.observability.printable import shown
from hybridflow.observability.report.record import Series

WIDTH, HEIGHT = 372, 188
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
COLORS = 11

_MAX_POINTS = 360
_SMOOTHED_FROM = 16
_MARKED_UP_TO = 24
_PLAIN_DECIMALS = 4
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from `low..high` to `start..end` in drawing units."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The position of a value on the drawing."""
        low, high, value = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int) -> list[tuple[float, str]]:
        """About `wanted` round values within the scale, with their labels."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            stride = max(1, round(len(powers) / wanted))
            return [(10.0**power, f"1e{power}") for power in powers[::stride]]
        gap = round_gap((self.high - self.low) / wanted)
        first, last = math.ceil(self.low / gap - 1e-9), math.floor(self.high / gap + 1e-9)
        return [(place * gap, tick_label(place * gap, gap)) for place in range(first, last + 1)]


@dataclass(frozen=True)
class Chart:
    """A title, a note on how to read the chart, and series that share a scale.

    In a chart `of_runs` the series are one metric of several runs, by whose names they are called; those of runs
    without the metric are empty, so that a run has the same color in every chart.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    is_log: bool = False
    is_smoothed: bool = True
    of_runs: bool = False

    @property
    def labels(self) -> list[str]:
        """The names of the series in the legend and next to the pointer."""
        names = [each.name for each in self.series]
        if self.of_runs:
            return names
        return short_labels(names) if len(names) > 1 else names


def chart_card(chart: Chart, faults: Sequence[Fault] = ()) -> str:
    """A card: title, latest value, the chart with marks at faults, and a legend if there are several series."""
    latest = [each.finite[-1] for each in chart.series if each.finite]
    value = f'<span class="latest">{formatting.short(latest[0])}</span>' if latest and not chart.of_runs else ""
    note = f'<p class="note">{shown(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="card chart"><figcaption>{shown(chart.title)}{value}</figcaption>'
        f"{note}{_legend(chart)}{line_chart(chart, faults)}</figure>"
    )


def line_chart(chart: Chart, faults: Sequence[Fault] = ()) -> str:
    """The SVG of a chart: grid, axes, faults, and one line per series, with a smoothed line if it is long."""
    drawn = [_thinned(each) for each in chart.series]
    x = step_axis([step for each in drawn for step in each.steps], LEFT, WIDTH - RIGHT)
    y = value_axis([v for each in drawn for v in each.values], HEIGHT - BOTTOM, TOP, is_log=chart.is_log)
    lines = "".join(
        _course(each, thin, f"c{place % COLORS}", x, y, is_smoothed=chart.is_smoothed)
        for place, (each, thin) in enumerate(zip(chart.series, drawn, strict=True))
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(chart.title)}" '
        f"data-chart='{_hover_data(chart, drawn, x, y)}'>{grid(x, y)}{_marks(faults, x, y)}{lines}</svg>"
    )


def grid(x: Axis, y: Axis) -> str:
    """Horizontal rules with their values, and steps below."""
    parts = []
    for value, label in y.ticks(7):
        at = y.place(value)
        parts.append(f'<line class="rule" x1="{x.start:.0f}" x2="{x.end:.0f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{x.start - 6:.0f}" y="{at + 3.5:.1f}" text-anchor="end">{label}</text>')
    for value, label in x.ticks(5):
        if value == round(value):
            parts.append(f'<text x="{x.place(value):.1f}" y="{HEIGHT - 7}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def sparkline(values: Sequence[float], *, width: int = 96, height: int = 26) -> str:
    """A line without axes, for a tile."""
    numbers = [value for value in values if math.isfinite(value)]
    if len(numbers) < 2:
        return ""
    x = Axis(0.0, len(numbers) - 1.0, 2.0, width - 3.0)
    numbers = smoothed(numbers) if len(numbers) >= _SMOOTHED_FROM else numbers
    y = value_axis(numbers, height - 2.0, 2.0)
    points = " ".join(f"{x.place(place):.1f},{y.place(value):.1f}" for place, value in enumerate(numbers))
    box = f'viewBox="0 0 {width} {height}" preserveAspectRatio="none"'
    return f'<svg class="spark" {box} aria-hidden="true"><polyline points="{points}"/></svg>'


def smoothed(values: Sequence[float]) -> list[float]:
    """Bias-corrected exponential moving average over a twentieth of the run; skips NaN."""
    keep = 1.0 - 2.0 / (max(6.0, len(values) / 20.0) + 1.0)
    total, weight, course = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1.0
        course.append(total / weight if weight else math.nan)
    return course


def short_labels(names: Sequence[str]) -> list[str]:
    """Names without the parts (between slashes) that all of them share at the start and end."""
    parts = [name.split("/") for name in names]
    for end in (0, -1):
        while min(map(len, parts)) > 1 and len({each[end] for each in parts}) == 1:
            for each in parts:
                del each[end]
    return ["/".join(each).replace("_", " ") for each in parts]


def _legend(chart: Chart) -> str:
    if [each.name for each in chart.series] == [chart.title]:
        return ""
    items = [
        f'<li class="c{place % COLORS}">{shown(label)}</li>'
        for place, (label, each) in enumerate(zip(chart.labels, chart.series, strict=True))
        if each.steps
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _marks(faults: Sequence[Fault], x: Axis, y: Axis) -> str:
    """A dashed line with a triangle above it for each fault, in another color if it ended the run."""
    parts = []
    for at, kind in dict.fromkeys((fault.at, "survived" if fault.is_survived else "fatal") for fault in faults):
        place = x.place(min(max(at, x.low), x.high))
        line = f"M{place:.1f} {y.start:.0f}V{y.end:.0f}"
        tip = f"M{place - 4:.1f} {y.end - 6:.0f}h8l-4 6z"
        parts.append(f'<g class="fault {kind}"><path class="cross" d="{line}"/><path class="tip" d="{tip}"/></g>')
    return "".join(parts)


def _course(series: Series, thin: Series, color: str, x: Axis, y: Axis, *, is_smoothed: bool) -> str:
    if is_smoothed and len(series.values) >= _SMOOTHED_FROM:
        smooth = _thinned(Series(series.name, series.steps, smoothed(series.values)))
        return _line(thin, f"raw {color}", x, y) + _line(smooth, color, x, y)
    line = _line(thin, color, x, y)
    if len(series.values) > _MARKED_UP_TO:
        return line
    return line + "".join(
        f'<circle class="dot {color}" cx="{x.place(step):.1f}" cy="{y.place(value):.1f}" r="2.6"/>'
        for step, value in zip(series.steps, series.values, strict=True)
        if _is_drawable(value, y)
    )


def _line(series: Series, kind: str, x: Axis, y: Axis) -> str:
    """Line segments; there is a gap where a value is missing."""
    path, command = "", "M"
    for step, value in zip(series.steps, series.values, strict=True):
        if _is_drawable(value, y):
            path += f"{command}{x.place(step):.1f} {y.place(value):.1f}"
        command = "L" if _is_drawable(value, y) else "M"
    return f'<path class="line {kind}" d="{path}"/>'


def _is_drawable(value: float, y: Axis) -> bool:
    return math.isfinite(value) and (value > 0.0 or not y.is_log)


def _thinned(series: Series) -> Series:
    """At most about `_MAX_POINTS` points: the ends, and the minimum and maximum of each bucket, so spikes stay."""
    size = len(series.steps)
    if size <= _MAX_POINTS:
        return series
    buckets = _MAX_POINTS // 2
    kept = {0, size - 1}
    for bucket in range(buckets):
        stretch = range(bucket * size // buckets, (bucket + 1) * size // buckets)
        finite = [place for place in stretch if math.isfinite(series.values[place])] or [stretch[0]]
        kept |= {min(finite, key=series.values.__getitem__), max(finite, key=series.values.__getitem__)}
    places = sorted(kept)
    return Series(series.name, [series.steps[place] for place in places], [series.values[place] for place in places])


def _hover_data(chart: Chart, drawn: Sequence[Series], x: Axis, y: Axis) -> str:
    labels = chart.labels if len(drawn) > 1 else [chart.title.lower()]
    rounded = [[float(f"{v:.4g}") if math.isfinite(v) else None for v in each.values] for each in drawn]
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "log": y.is_log,
        "series": [
            {"label": label, "x": each.steps, "y": values}
            for label, each, values in zip(labels, drawn, rounded, strict=True)
        ],
    }
    return shown(json.dumps(data, separators=(",", ":")))


def value_axis(values: Sequence[float], start: float, end: float, *, is_log: bool = False) -> Axis:
    """An axis that holds the finite values with some margin, starting at zero if that is near."""
    numbers = [value for value in values if math.isfinite(value) and (value > 0.0 or not is_log)]
    if not numbers:
        return Axis(0.1 if is_log else 0.0, 1.0, start, end, is_log)
    low, high = min(numbers), max(numbers)
    if is_log:
        return Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** (math.floor(math.log10(high)) + 1), start, end, True)
    if 0.0 < low < 0.4 * high:
        low = 0.0
    air = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(low if low == 0.0 else low - air, high + air, start, end)


def step_axis(steps: Sequence[int], start: float, end: float) -> Axis:
    """An axis from the first to the last step."""
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    return Axis(low, high if high > low else low + 1, start, end)


def round_gap(gap: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `gap`."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(size * power for size in (1.0, 2.0, 5.0, 10.0) if size * power >= gap * (1.0 - 1e-9))


def tick_label(value: float, gap: float) -> str:
    """The value with as many digits as the gap between ticks needs for distinct labels."""
    for size, unit in _UNITS:
        if gap >= 1000.0 and abs(value) >= size:
            return f"{value / size:.{_decimals(gap / size)}f}{unit}"
    if _decimals(gap) <= _PLAIN_DECIMALS or abs(value) >= 1e-3:
        return f"{value:.{_decimals(gap)}f}"
    return f"{value:.{_decimals(gap / 10.0 ** math.floor(math.log10(abs(value))))}e}" if value else "0"


def _decimals(gap: float) -> int:
    """Digits after the point that distinguish multiples of the gap, which is 1, 2 or 5 times a power of ten."""
    return max(0, -math.floor(math.log10(gap) + 1e-9))
