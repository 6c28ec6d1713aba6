"""The time of a run by stage: the share of each, and seconds over steps."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hybridflow.observability import formatting
from hybridflow.observability.printable import shown
from hybridflow.observability.report.charts import BOTTOM, COLORS, HEIGHT, LEFT, RIGHT, TOP, grid, step_axis, value_axis
from hybridflow.observability.report.record import Series

_STAGE_NAMES = {
    "gen": "generate",
    "reward": "reward",
    "old_log_prob": "old logprobs",
    "ref": "reference logprobs",
    "values": "values",
    "adv": "advantages",
    "update_critic": "update critic",
    "update_actor": "update actor",
    "update_weights": "publish weights",
    "testing": "evaluate",
    "save_checkpoint": "save checkpoint",
}
_STAGE = re.compile(r"timing_s/(?!reshard)(.+)")
"""Resharding is part of the stage `update_weights`."""

_MAX_BARS = 120
_WIDTH = 560


def stage_times(metrics: Mapping[str, Series]) -> tuple[list[int], dict[str, list[float]]]:
    """The steps, and the seconds of each stage at each of them.

    First the stages of `timing_s/*` in the order of a step, then unknown ones, then the rest of `timing_s/step`.
    """
    found = {stage[1]: series for name, series in metrics.items() if (stage := _STAGE.fullmatch(name))}
    steps = sorted({step for series in found.values() for step in series.steps})
    whole = _by_step(found.pop("step", None), steps)
    known = list(_STAGE_NAMES)
    names = sorted(found, key=lambda name: known.index(name) if name in known else len(known))
    seconds = {name: _by_step(found[name], steps) for name in names}
    spent = [math.fsum(column) for column in zip(*seconds.values(), strict=True)] or [0.0] * len(steps)
    other = [max(0.0, all_of_it - part) for all_of_it, part in zip(whole, spent, strict=True)]
    if math.fsum(other) > 0.005 * math.fsum(spent):
        seconds["other"] = other
    return steps, seconds


def timing_section(metrics: Mapping[str, Series]) -> str:
    """A bar of shares, a table of stages and stacked bars over steps; empty if nothing was timed."""
    steps, times = stage_times(metrics)
    totals = {stage: math.fsum(seconds) for stage, seconds in times.items()}
    whole = math.fsum(totals.values())
    if whole <= 0.0:
        return ""
    shares, rows = [], []
    for place, (stage, total) in enumerate(totals.items()):
        color = _color(stage, place)
        label = shown(_STAGE_NAMES.get(stage, stage.replace("_", " ")))
        share = f"{100.0 * total / whole:.1f}%"
        shares.append(f'<span class="{color}" style="flex-grow:{total / whole:.5f}" title="{label} {share}"></span>')
        rows.append(
            f'<tr><td><i class="key {color}"></i>{label}</td><td>{formatting.short(total / len(steps))}</td>'
            f"<td>{formatting.spoken_duration(total)}</td><td>{share}</td></tr>"
        )
    return (
        '<section><h2>Where the time went</h2><div class="card timing">'
        f'<div class="shares">{"".join(shares)}</div><div class="columns"><table class="figures"><thead><tr><th>stage'
        f"</th><th>s / step</th><th>total</th><th>share</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f'<figure class="chart"><p class="note">Seconds per step</p>{stacked_bars(steps, times)}</figure>'
        "</div></div></section>"
    )


def stacked_bars(steps: Sequence[int], times: Mapping[str, list[float]]) -> str:
    """One bar per step (neighboring steps are averaged if there are many), with stages in the order of the table."""
    count = min(_MAX_BARS, len(steps))
    edges = [place * len(steps) // count for place in range(count + 1)]
    heights = {
        stage: [math.fsum(seconds[a:b]) / (b - a) for a, b in pairwise(edges)] for stage, seconds in times.items()
    }
    tops = [math.fsum(column) for column in zip(*heights.values(), strict=True)]
    x = step_axis(steps, LEFT + 10.0, _WIDTH - RIGHT - 10.0)
    y = replace(value_axis([0.0, *tops], HEIGHT - BOTTOM, TOP), low=0.0)
    parts = [grid(x, y)]
    room = (x.end - x.start) / max(1, count - 1) if count > 1 else 24.0
    width = min(18.0, max(1.0, room * 0.8))
    bases = [0.0] * count
    for place, (stage, means) in enumerate(heights.items()):
        color = _color(stage, place)
        for bar, mean in enumerate(means):
            middle = x.place(steps[(edges[bar] + edges[bar + 1] - 1) // 2])
            bottom, top = y.place(bases[bar]), y.place(bases[bar] + mean)
            if bottom - top >= 0.05:
                left, height = middle - width / 2, bottom - top
                box = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.2f}"'
                parts.append(f'<rect class="{color}" {box}/>')
            bases[bar] += mean
    return f'<svg viewBox="0 0 {_WIDTH} {HEIGHT}" role="img" aria-label="seconds of each stage">{"".join(parts)}</svg>'


def _color(stage: str, place: int) -> str:
    return "c-other" if stage == "other" else f"c{place % COLORS}"


def _by_step(series: Series | None, steps: Sequence[int]) -> list[float]:
    known = dict(zip(series.steps, series.values, strict=True)) if series is not None else {}
    return [value if math.isfinite(value := known.get(step, 0.0)) else 0.0 for step in steps]
