"""A traced step as a self-contained SVG page, in light and dark."""

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

from hybridflow.graph.geometry import Band, Box, Layout, laid_out, line_y
from hybridflow.graph.trace import Trace
from hybridflow.observability.drawing import styles

_STYLE = """
  .wire { fill: none; stroke-width: 1.6; } .hollow { fill: none; stroke: #8b92a7; stroke-width: 1.4; }
"""
_DARK_STYLE = """
  .hollow { stroke: #7d859b; }
"""
_CORNER = 5.0


def svg_drawing(trace: Trace) -> str:
    """The whole page: lanes of pools and roles, calls as boxes, columns as wires, time to the right."""
    layout = laid_out(trace)
    numbers = trace.colors
    colors = {call.number: numbers[call.role] for call in trace.calls}
    height = layout.height + 34
    description = f"One step of {trace.title}: {', '.join(call.name for call in trace.calls)}."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{layout.width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {layout.width:.0f} {height:.0f}" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(trace.title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        styles(sorted(set(numbers.values())), _STYLE, _DARK_STYLE),
        f'<rect class="page" width="{layout.width:.0f}" height="{height:.0f}" rx="14"/>',
        f'<text class="title" x="24" y="40">{escape(trace.title)}</text>',
        f'<text class="soft" x="24" y="62">{escape(trace.purpose)}</text>',
        *([f'<text class="soft" x="24" y="77">{escape(trace.ahead_in_words)}</text>'] if trace.lag else []),
        *_axis(layout),
        *(part for band in layout.bands for part in _band(band, layout, trace, numbers)),
        *(f'<path class="wire s{colors[wire.maker]}" d="{_rounded(wire.points)}"/>' for wire in layout.wires),
        *(part for box in layout.boxes for part in _box(box, colors)),
        *_legend(layout.height + 8),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _axis(layout: Layout) -> Iterator[str]:
    yield '<text class="soft" x="24" y="92">time</text>'
    for time, x in layout.times.items():
        is_shared = sum(box.call.time == time for box in layout.boxes) > 1
        words = f"{time}: concurrent" if is_shared else str(time)
        yield f'<text class="soft middle" x="{x:.1f}" y="92">{words}</text>'


def _band(band: Band, layout: Layout, trace: Trace, numbers: Mapping[str, int]) -> Iterator[str]:
    devices = trace.pools[band.pool]
    yield (
        f'<rect class="band" x="10.5" y="{band.y:.1f}" width="{layout.width - 21:.1f}" height="{band.height:.1f}"'
        ' rx="10"/>'
    )
    plural = "s" if devices > 1 else ""
    yield f'<text class="soft" x="24" y="{band.y + 18:.1f}">pool {escape(band.pool)}: {devices} device{plural}</text>'
    of_name = {role.name: role for role in trace.roles}
    for name, top in band.rows.items():
        yield f'<text class="name f{numbers[name]}" x="24" y="{top + 17:.1f}">{escape(name)}</text>'
        if name in of_name:
            role = of_name[name]
            yield f'<text class="soft" x="24" y="{top + 33:.1f}">{escape(role.kind)}</text>'
            for number, words in enumerate(role.runs_on.split(", ")):
                yield f'<text class="soft" x="24" y="{top + 48 + 15 * number:.1f}">{escape(words)}</text>'


def _box(box: Box, colors: Mapping[int, int]) -> Iterator[str]:
    own = colors[box.call.number]
    yield (
        f'<rect class="card" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="7"/>'
    )
    yield f'<rect class="f{own}" x="{box.x:.1f}" y="{box.y + 5:.1f}" width="3" height="14" rx="1.5"/>'
    yield (
        f'<text x="{box.x + 10:.1f}" y="{box.y + 17:.1f}"><tspan class="soft">{box.call.number}</tspan>'
        f' <tspan class="name f{own}">{escape(box.call.role)}</tspan>'
        f'<tspan class="name">.{escape(box.call.method)}</tspan></text>'
    )
    for index, line in enumerate(box.lines):
        y = line_y(box.y, index)
        if line.kind == "data" and line.maker is not None:
            yield f'<circle class="hollow" cx="{box.x + 11:.1f}" cy="{y:.1f}" r="3"/>'
        elif line.maker is not None:
            yield f'<path class="f{colors[line.maker]}" d="M{box.x + 1:.1f} {y - 4:.1f} l9 4 l-9 4 z"/>'
        style = {"adds": f"mono f{own}", "takes": "mono"}.get(line.kind, "mono soft")
        text = escape(line.text).replace(" ", "\u00a0")
        yield f'<text class="{style}" x="{box.x + 20:.1f}" y="{y + 4:.1f}">{text}</text>'


def _rounded(points: Sequence[tuple[float, float]]) -> str:
    """A line through right angles, with round corners."""
    corners = [point for n, point in enumerate(points) if n == 0 or point != points[n - 1]]
    path = [f"M{corners[0][0]:.1f} {corners[0][1]:.1f}"]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        entry, leave = _towards(corner, before), _towards(corner, after)
        path.append(f"L{entry[0]:.1f} {entry[1]:.1f} Q{corner[0]:.1f} {corner[1]:.1f} {leave[0]:.1f} {leave[1]:.1f}")
    path.append(f"L{corners[-1][0]:.1f} {corners[-1][1]:.1f}")
    return " ".join(path)


def _towards(corner: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """A point near a corner, at most half way to the next one."""
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = max(abs(dx) + abs(dy), 1e-9)
    step = min(_CORNER, length / 2) / length
    return corner[0] + dx * step, corner[1] + dy * step


def _legend(y: float) -> Iterator[str]:
    words = "columns of the data.  An arrow: columns of the call that it comes from.  + columns that the call adds."
    yield f'<circle class="hollow" cx="28" cy="{y + 6:.1f}" r="3"/>'
    yield f'<text class="soft" x="38" y="{y + 10:.1f}">{words}</text>'
