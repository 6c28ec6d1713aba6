"""Line charts as inline SVG; the page's script adds a cross-hair with values."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.observability import formatting
from hybridflow.observability.report.axes import Axis, step_axis, value_axis
from hybridflow.observability.report.escape import shown
from hybridflow.observability.report.record import Series

WIDTH, HEIGHT = 372, 188
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 24
COLORS = 11

_MAX_POINTS = 360
_SMOOTHED_FROM = 16
_MARKED_UP_TO = 24


@dataclass(frozen=True)
class Chart:
    """What is drawn: a title, a sentence on how to read it, and series that share a scale."""

    title: str
    series: Sequence[Series]
    note: str = ""
    is_log: bool = False
    is_smoothed: bool = True


def chart_card(chart: Chart) -> str:
    """A card: title, latest value, the chart, and a legend when there are several series."""
    latest = [each.finite[-1] for each in chart.series if each.finite]
    value = f'<span class="latest">{formatting.short(latest[0])}</span>' if latest else ""
    note = f'<p class="note">{shown(chart.note)}</p>' if chart.note else ""
    return (
        f'<figure class="card chart"><figcaption>{shown(chart.title)}{value}</figcaption>'
        f"{note}{_legend(chart)}{line_chart(chart)}</figure>"
    )


def line_chart(chart: Chart) -> str:
    """The SVG of a chart: grid, axes, one line a series (and its smoothed course where it is long)."""
    drawn = [_thinned(each) for each in chart.series]
    x = step_axis([step for each in drawn for step in each.steps], LEFT, WIDTH - RIGHT)
    y = value_axis([v for each in drawn for v in each.values], HEIGHT - BOTTOM, TOP, is_log=chart.is_log)
    lines = "".join(
        _course(each, thin, f"c{place % COLORS}", x, y, is_smoothed=chart.is_smoothed)
        for place, (each, thin) in enumerate(zip(chart.series, drawn, strict=True))
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown(chart.title)}" '
        f"data-chart='{_hover_data(chart, drawn, x, y)}'>{grid(x, y)}{lines}</svg>"
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
    """Exponential moving average over a twentieth of the run, without the bias of a zero start; skips NaN."""
    keep = 1.0 - 2.0 / (max(6.0, len(values) / 20.0) + 1.0)
    total, weight, course = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1.0
        course.append(total / weight if weight else math.nan)
    return course


def short_labels(names: Sequence[str]) -> list[str]:
    """Names without the parts (between slashes) that all share at their beginning and end."""
    parts = [name.split("/") for name in names]
    shortest = min((len(each) for each in parts), default=0)
    start = 0
    while start < shortest - 1 and len({each[start] for each in parts}) == 1:
        start += 1
    end = 0
    while end < shortest - start - 1 and len({each[len(each) - 1 - end] for each in parts}) == 1:
        end += 1
    return ["/".join(each[start : len(each) - end]).replace("_", " ") for each in parts]


def _legend(chart: Chart) -> str:
    if len(chart.series) < 2:
        return ""
    labels = short_labels([each.name for each in chart.series])
    items = [f'<li class="c{place % COLORS}">{shown(label)}</li>' for place, label in enumerate(labels)]
    return f'<ul class="legend">{"".join(items)}</ul>'


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
    return f'<path class="line {kind}" d="{_path(series.steps, series.values, x, y)}"/>'


def _path(steps: Sequence[int], values: Sequence[float], x: Axis, y: Axis) -> str:
    """Line segments; the line is broken where a value is missing."""
    commands, is_down = [], False
    for step, value in zip(steps, values, strict=True):
        if _is_drawable(value, y):
            commands.append(f"{'L' if is_down else 'M'}{x.place(step):.1f} {y.place(value):.1f}")
        is_down = _is_drawable(value, y)
    return "".join(commands)


def _is_drawable(value: float, y: Axis) -> bool:
    return math.isfinite(value) and (value > 0.0 or not y.is_log)


def _thinned(series: Series) -> Series:
    """At most about `_MAX_POINTS` points: the ends, and of each stretch the lowest and the highest, so spikes stay."""
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
    labels = short_labels([each.name for each in drawn]) if len(drawn) > 1 else [chart.title.lower()]
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "log": y.is_log,
        "series": [
            {
                "label": label,
                "x": each.steps,
                "y": [float(f"{value:.4g}") if math.isfinite(value) else None for value in each.values],
            }
            for label, each in zip(labels, drawn, strict=True)
        ],
    }
    return shown(json.dumps(data, separators=(",", ":")))
