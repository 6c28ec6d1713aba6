"""One step of a run as a timeline: a row per rank with its calls, idle pools, the critical path, and a table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hybridflow.observability import formatting
from hybridflow.observability.calls import CallTotal, Section, Span
from hybridflow.observability.printable import shown
from hybridflow.observability.report.charts import Axis
from hybridflow.observability.report.document import html_table
from hybridflow.observability.role_colors import DARK, LIGHT, role_colors
from hybridflow.observability.trace import STEP, TRACE_FILE, measured_calls

_MOST_ROWS = 16
"""Above this number of ranks, a pool is one row."""

_WIDTH, _LEFT, _RIGHT = 1160.0, 64.0, 14.0
_ROW, _GAP, _HEADING, _AXIS = 24.0, 4.0, 24.0, 26.0
_CHARACTER = 6.7
_BYTES = 1e6


def timeline_section(sections: Sequence[Section]) -> str:
    """The last step of the trace; empty without one."""
    steps = [section for section in sections if section.what == STEP and section.spans]
    if not steps:
        return ""
    step = replace(steps[-1], spans=[span for span in steps[-1].spans if steps[-1].seconds_within(span)])
    path = step.critical_path()
    seconds = math.fsum(map(step.seconds_within, path))
    colors = role_colors(span.role for span in step.spans)
    legend = "".join(f'<li class="r{color}">{shown(role)}</li>' for role, color in colors.items())
    return (
        f'<section id="timeline">{_style()}<h2>Step {step.step} as a timeline</h2>'
        f'<p class="note">The calls in full color are the critical path, {formatting.short(seconds)} s of the'
        f" {formatting.short(step.seconds)} s: making other calls faster does not shorten the step. {TRACE_FILE} has"
        f" the calls of the last {formatting.counted(len(steps), 'step')}; open it in Perfetto (ui.perfetto.dev).</p>"
        '<div class="card scroll"><ul class="legend">'
        f"{legend}</ul>{_drawing(step, path, colors)}</div>{_table(step, sections, colors, path)}</section>"
    )


def _style() -> str:
    def of(colors: Sequence[str]) -> str:
        return "".join(f"#timeline .r{number}{{--series:{color}}}" for number, color in enumerate(colors))

    return f"<style>{of(LIGHT)}@media(prefers-color-scheme:dark){{{of(DARK)}}}</style>"


def _drawing(step: Section, path: Sequence[Span], colors: Mapping[str, int]) -> str:
    critical = {(span.call, span.rank) for span in path}
    x = Axis(0.0, max(step.seconds, 1e-6), _LEFT, _WIDTH - _RIGHT)
    idle, top, parts = step.idle_fractions(), 4.0, list[str]()
    by_rank = sum(step.pools.values()) <= _MOST_ROWS
    for pool, ranks in step.pools.items():
        words = f"{pool}: {formatting.counted(ranks, 'rank')}, idle {100.0 * idle[pool]:.0f}%"
        parts.append(f'<text class="pool" x="0" y="{top + 16:.0f}">{shown(words)}</text>')
        top += _HEADING
        own = [span for span in step.spans if span.pool == pool]
        rows = {f"rank {rank}": [span for span in own if span.rank == rank] for rank in range(ranks)}
        for name, spans in (rows if by_rank else {"all ranks": list(_of_pool(own, critical))}).items():
            label = f'<text x="{_LEFT - 8:.0f}" y="{top + _ROW / 2 + 4:.0f}" text-anchor="end">{name}</text>'
            lane = f'<rect class="lane" x="{x.start}" y="{top}" width="{x.end - x.start}" height="{_ROW}" rx="3"/>'
            parts += [label, lane, *(_box(step, span, x, top, colors, critical) for span in spans)]
            top += _ROW + _GAP
        top += _GAP
    ticks = "".join(
        f'<line class="rule" x1="{x.place(value):.1f}" x2="{x.place(value):.1f}" y1="4" y2="{top:.0f}"/>'
        f'<text x="{x.place(value):.1f}" y="{top + 16:.0f}" text-anchor="middle">{text} s</text>'
        for value, text in x.ticks(8)
    )
    box = f'viewBox="0 0 {_WIDTH:.0f} {top + _AXIS:.0f}"'
    return f'<svg class="timeline" {box} role="img" aria-label="calls of one step">{ticks}{"".join(parts)}</svg>'


def _of_pool(spans: Sequence[Span], critical: set[tuple[int, int]]) -> Iterator[Span]:
    """For each call, one span from its first start to its last end; it is critical if it is so on a rank."""
    calls: dict[int, list[Span]] = {}
    for span in spans:
        calls.setdefault(span.call, []).append(span)
    for own in calls.values():
        start, end = min(span.start for span in own), max(span.end for span in own)
        waited = min(span.work_start for span in own) - start
        chosen = next((span for span in own if (span.call, span.rank) in critical), own[0])
        yield chosen._replace(start=start, seconds=end - start, waited_seconds=waited)


def _box(
    step: Section, span: Span, x: Axis, top: float, colors: Mapping[str, int], critical: set[tuple[int, int]]
) -> str:
    start, works = max(0.0, span.start - step.start), max(0.0, span.work_start - step.start)
    left, right = x.place(works), x.place(min(step.seconds, span.end - step.start))
    width = max(1.5, right - left)
    is_critical = (span.call, span.rank) in critical
    fitting = [name for name in (span.name, span.method) if len(name) * _CHARACTER + 8 <= width]
    text = f'<text x="{left + 5:.1f}" y="{top + _ROW / 2 + 4:.1f}">{shown(fitting[0])}</text>' if fitting else ""
    about = f"{span.name}: {formatting.short(span.seconds)} s from {formatting.short(start)} s"
    wait = ""
    if span.waited_seconds:
        about += f", {formatting.short(span.waited_seconds)} s of it waiting for another pool"
        place = f'x="{x.place(start):.1f}" y="{top}" width="{left - x.place(start):.1f}" height="{_ROW}"'
        wait = f'<rect class="wait" {place}/>'
    about += f"\n{span.rows} rows, {span.tokens} tokens, {span.bytes_in / _BYTES:.3g} MB in" if span.rows else ""
    return (
        f'<g class="call r{colors[span.role]}{" critical" if is_critical else ""}"><title>{shown(about)}</title>{wait}'
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_ROW}" rx="2"/>{text}</g>'
    )


def _table(step: Section, sections: Sequence[Section], colors: Mapping[str, int], path: Sequence[Span]) -> str:
    titles = ["call", "s", "of the step", "on the critical path, s", "median s", "rows", "tokens", "MB in", "MB out"]
    usual, rows = measured_calls(sections), []
    for (role, method), total in step.totals().items():
        name = f"{role}.{method}"
        on_path = math.fsum(step.seconds_within(span) for span in path if span.name == name)
        cells = _cells(total, step.seconds, on_path, usual[name])
        key = f'<i class="key r{colors[role]}"></i>'
        rows.append(f"<td>{key}{shown(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells))
    return html_table("figures calls", titles, rows)


def _cells(total: CallTotal, seconds: float, on_path: float, usual: CallTotal) -> Iterator[str]:
    yield formatting.short(total.seconds)
    yield formatting.percent(total.seconds, seconds)
    yield formatting.short(on_path) if on_path else ""
    yield formatting.short(usual.seconds)
    for number in (total.rows, total.tokens):
        yield formatting.count(number) if number else ""
    for number in (total.bytes_in, total.bytes_out):
        yield formatting.short(number / _BYTES) if number else ""
