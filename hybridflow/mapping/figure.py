"""A planned step as a self-contained SVG page: its calls over time per pool, and each pool's memory per device."""

from collections.abc import Iterator, Mapping, Sequence
from math import log10
from xml.sax.saxutils import escape

from hybridflow.mapping.contents import CONTENTS, MemoryPhase
from hybridflow.mapping.explanation import PlannedCall, PlannedPool, StepFacts, step_facts
from hybridflow.mapping.memory.phases import ENGINES, gib
from hybridflow.mapping.planner import PlannedStep
from hybridflow.observability.drawing import styles
from hybridflow.observability.formatting import counted, percent, short, spoken_duration
from hybridflow.observability.printable import printable
from hybridflow.observability.role_colors import role_colors

_WIDTH, _LEFT, _RIGHT = 1180.0, 190.0, 1150.0
_CARD_RIGHT = 1000.0
_LANE, _ROW, _HEADER = 56.0, 26.0, 24.0
_CHARACTER = 6.9
"""Width of a character, for whether a label fits."""

_STYLE = """
  .on { fill: #ffffff; } .pale { fill-opacity: .2; stroke-width: 1.2; } .grid { stroke: #dcdfe9; }
  .rest { fill: #8b92a7; } .full { fill: none; stroke: #5c6378; stroke-width: 1.3; } .small { font-size: 11px; }
  .end { text-anchor: end; }
"""
_DARK_STYLE = """
  .on { fill: #12141b; } .grid { stroke: #2b3040; } .rest { fill: #7d859b; } .full { stroke: #a1a8bd; }
"""


def svg_of(step: PlannedStep) -> str:
    """The whole page of a plan."""
    facts, cluster = step_facts(step), step.request.cluster
    most = max(each.device.memory_bytes for each in (cluster, *step.request.pool_clusters.values()))
    colors = role_colors(call.role for call in facts.calls if call.seconds)
    top = 92.0
    timeline = [*_timeline(facts, colors, top)]
    memory_top = top + 76 + (_LANE + 8) * len(facts.pools)
    memory = [*_memory(facts.pools, most, memory_top)]
    rows = sum(len(pool.memory) for pool in facts.pools)
    height = memory_top + 42 + rows * _ROW + (_HEADER + 16) * len(facts.pools) + 8
    title = _safe(f"{step.request.title} on {cluster.num_devices} x {cluster.device.name}")
    purpose = f"A step takes about {spoken_duration(facts.seconds)}. {step.plan.name}"
    words = "; ".join(f"{call.name} {short(call.seconds)} s" for call in facts.calls)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-labelledby="title description">',
        f'<title id="title">{title}</title>',
        f'<desc id="description">{_safe(words)}</desc>',
        styles({*colors.values(), *range(len(CONTENTS))}, _STYLE, _DARK_STYLE),
        f'<rect class="page" width="{_WIDTH:.0f}" height="{height:.0f}" rx="14"/>',
        f'<text class="title" x="24" y="40">{title}</text>',
        f'<text class="soft" x="24" y="62">{_safe(purpose)}</text>',
        *timeline,
        *memory,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _timeline(facts: StepFacts, colors: Mapping[str, int], top: float) -> Iterator[str]:
    """The calls of each pool over time, with an axis above and a legend below."""
    yield f'<text class="name" x="24" y="{top + 12:.1f}">calls</text>'
    lanes_top = top + 24
    bottom = lanes_top + (_LANE + 8) * len(facts.pools)
    for number in range(len(facts.pools)):
        y = lanes_top + (_LANE + 8) * number
        yield f'<rect class="band" x="10.5" y="{y:.1f}" width="{_WIDTH - 21:.1f}" height="{_LANE}" rx="10"/>'
    for time in _ticks(_span(facts)):
        x = _at(time, facts)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{lanes_top - 4:.1f}" y2="{bottom - 4:.1f}"/>'
        yield f'<text class="soft middle" x="{x:.1f}" y="{top + 12:.1f}">{time:g} s</text>'
    for number, pool in enumerate(facts.pools):
        y = lanes_top + (_LANE + 8) * number
        yield f'<text class="name" x="24" y="{y + 21:.1f}">{_safe(_clipped(pool.name, 21))}</text>'
        words = f"{counted(pool.num_devices, 'device')}, idle {percent(pool.idle_fraction, 1)}"
        yield f'<text class="soft small" x="24" y="{y + 40:.1f}">{words}</text>'
        for call in facts.calls:
            if call.pool == pool.name and call.seconds:
                yield from _bar(call, facts, colors[call.role], y + 8)
    names = [(role, f"f{color}") for role, color in colors.items()]
    yield from _legend(names, bottom + 14)
    if not all(call.is_critical for call in facts.calls if call.seconds):
        note = "Pale: not on the critical path."
        yield f'<text class="soft end" x="{_RIGHT:.1f}" y="{bottom + 24:.1f}">{note}</text>'


def _bar(call: PlannedCall, facts: StepFacts, color: int, y: float) -> Iterator[str]:
    x = _at(call.start_seconds, facts)
    width = max(_at(call.end_seconds, facts) - x, 1.5)
    style = f"f{color}" if call.is_critical else f"f{color} s{color} pale"
    seconds = f"{short(call.seconds)} s"
    yield f"<g><title>{_safe(call.name)}: {seconds}, {percent(call.share, 1)} of the step</title>"
    drawn, rounded = max(width - 1.5, 1.5), min(5.0, width / 4)
    yield (
        f'<rect class="{style}" x="{x + 0.75:.1f}" y="{y:.1f}" width="{drawn:.1f}" height="{_LANE - 16}"'
        f' rx="{rounded:.1f}"/>'
    )
    written = [name for name in (call.name, call.name.rpartition(".")[2]) if _CHARACTER * len(name) + 12 <= width]
    on = " on" if call.is_critical else ""
    if written:
        yield f'<text class="{on.strip()}" x="{x + 8:.1f}" y="{y + 17:.1f}">{_safe(written[0])}</text>'
    if _CHARACTER * len(seconds) + 12 <= width:
        yield f'<text class="small{on}" x="{x + 8:.1f}" y="{y + (33 if written else 25):.1f}">{seconds}</text>'
    yield "</g>"


def _memory(pools: Sequence[PlannedPool], memory_bytes: float, top: float) -> Iterator[str]:
    """Each phase of each pool as one bar on the outline of the device's memory."""
    yield f'<text class="name" x="24" y="{top + 12:.1f}">memory per device, of {gib(memory_bytes)} GiB</text>'
    names = [*((name, f"f{number}") for number, name in enumerate(CONTENTS)), ("driver and libraries", "rest")]
    yield from _legend(names, top + 22)
    y = top + 50
    for pool in pools:
        height = _HEADER + _ROW * len(pool.memory) + 8
        yield f'<rect class="band" x="10.5" y="{y:.1f}" width="{_WIDTH - 21:.1f}" height="{height:.1f}" rx="10"/>'
        roles = ", ".join(role.role for role in pool.roles)
        roles = "" if roles == pool.name else f": {roles}"
        yield f'<text x="24" y="{y + 18:.1f}"><tspan class="name">{_safe(pool.name)}</tspan>{_safe(roles)}</text>'
        for number, phase in enumerate(pool.memory):
            yield from _stack(phase, memory_bytes, y + _HEADER + _ROW * number + 3)
        y += height + 8


def _stack(phase: MemoryPhase, memory_bytes: float, y: float) -> Iterator[str]:
    """The contents of a device's memory in one phase, from left to right."""
    scale, x, height = (_CARD_RIGHT - _LEFT) / memory_bytes, _LEFT, _ROW - 6
    yield f'<text class="soft" x="24" y="{y + 15:.1f}">{_safe(_clipped(phase.name, 24))}</text>'
    yield f'<rect class="card" x="{x:.1f}" y="{y:.1f}" width="{_CARD_RIGHT - x:.1f}" height="{height:.1f}" rx="3"/>'
    for name, style, size in _segments(phase):
        width = size * scale
        yield (
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{_safe(name)}: {gib(size)} GiB</title></rect>"
        )
        if _CHARACTER * len(gib(size)) + 8 <= width:
            yield f'<text class="small on middle" x="{x + width / 2:.1f}" y="{y + 14:.1f}">{gib(size)}</text>'
        x += width
    yield f'<rect class="full" x="{_LEFT}" y="{y:.1f}" width="{_CARD_RIGHT - _LEFT:.1f}" height="{height:.1f}" rx="3"/>'
    free = f"{gib(phase.free_bytes)} free" if phase.free_bytes >= 0 else f"{gib(-phase.free_bytes)} short"
    yield f'<text x="{_CARD_RIGHT + 10:.1f}" y="{y + 15:.1f}">{gib(phase.total_bytes)} GiB, {free}</text>'


def _segments(phase: MemoryPhase) -> list[tuple[str, str, float]]:
    """The contents of the memory with their names and styles, those that stay first."""
    contents = [(name, f"f{number}", size) for number, (name, size) in enumerate(phase.contents.items()) if size]
    return [(ENGINES, "rest", phase.parts_bytes.get(ENGINES, 0.0)), *contents]


def _legend(names: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """Colored squares with names, in one line."""
    x = 24.0
    for name, style in names:
        yield f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="11" height="11" rx="2"/>'
        yield f'<text class="soft" x="{x + 17:.1f}" y="{y + 10:.1f}">{_safe(name)}</text>'
        x += 17 + _CHARACTER * len(name) + 22


def _ticks(seconds: float) -> list[float]:
    """Round times from 0, at most 9 of them."""
    if seconds <= 0:
        return [0.0]
    power = 10.0 ** int(log10(seconds / 8) // 1)
    step = next(factor * power for factor in (1, 2, 5, 10) if seconds / (factor * power) <= 8)
    return [number * step for number in range(int(seconds / step) + 1)]


def _span(facts: StepFacts) -> float:
    """Seconds until the last call of the step ends: if samples are collected ahead, after the next step has begun."""
    return max((call.end_seconds for call in facts.calls), default=0.0)


def _at(seconds: float, facts: StepFacts) -> float:
    span = _span(facts)
    return _LEFT + (_RIGHT - _LEFT) * (seconds / span if span else 0.0)


def _clipped(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def _safe(text: str) -> str:
    return escape(printable(text))
