"""The report page: headline numbers, curves, timing, samples and configuration, in one file without other resources."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from hybridflow.observability import formatting
from hybridflow.observability.ending import UNRECORDED
from hybridflow.observability.printable import shown
from hybridflow.observability.progress import eval_label
from hybridflow.observability.report.catalogue import charts, other_charts
from hybridflow.observability.report.charts import chart_card, sparkline
from hybridflow.observability.report.config import config_section
from hybridflow.observability.report.record import RunRecord, Series, read_record
from hybridflow.observability.report.samples import samples_section
from hybridflow.observability.report.timing import timing_section

_HEADLINE_STEPS = 5
_MAX_EVAL_TILES = 3


def write_report(run_dir: Path, *, is_over: bool = False) -> Path:
    """Writes `run_dir/report.html` from metrics.jsonl, samples.jsonl and config.yaml, and returns its path.

    `is_over`: no process runs the run any more; if it has no ending, none was recorded.
    """
    record = read_record(run_dir)
    page = report_page(replace(record, ending=UNRECORDED) if is_over and record.ending is None else record)
    path = run_dir / "report.html"
    aside = path.with_name("report.html.partial")
    aside.write_text(page, encoding="utf-8", errors="replace")
    return aside.replace(path)


def report_page(record: RunRecord) -> str:
    """The whole page as HTML."""
    body = _header(record) + _curves(record) + timing_section(record.metrics) + samples_section(record)
    body += config_section(record.config_text) + _others(record)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(record.name)} - run report</title><style>{_asset('page.css')}</style></head>"
        f"<body><main>{body}</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _header(record: RunRecord) -> str:
    return (
        f'<header><p class="eyebrow">Run report</p><h1>{shown(record.name)}</h1>'
        f'<p class="lead">{_sentence(record)}</p>{_ending(record)}<div class="tiles">{_tiles(record)}</div></header>'
    )


def _sentence(record: RunRecord) -> str:
    timed = record.metrics.get("timing_s/step") or record.metrics.get("perf/time_per_step")
    seconds = math.fsum(timed.finite) if timed else 0.0
    steps = f"{record.last_step} step{'' if record.last_step == 1 else 's'}"
    took = f" in {formatting.spoken_duration(seconds)}" if seconds else ""
    return f"{steps}{took}, last updated {record.written:%Y-%m-%d %H:%M}"


def _ending(record: RunRecord) -> str:
    """How the run ended, unless it was simply done."""
    ending = record.ending
    if ending is None or ending.how == "done":
        return ""
    return f'<p class="ending {shown(ending.how)}"><strong>{shown(ending.how)}</strong> {shown(ending.said)}</p>'


def _tiles(record: RunRecord) -> str:
    metrics = record.metrics
    evaluations = [series for name, series in metrics.items() if name.startswith("val-core/")]
    tiles = [_evaluation_tile(series, record.last_step) for series in evaluations[:_MAX_EVAL_TILES]]
    for label, name in (
        ("training score", "critic/score/mean"),
        ("loss", "train/loss"),
        ("response length", "response_length/mean"),
        ("entropy", "actor/entropy"),
    ):
        if name in metrics:
            tiles.append(_change_tile(label, metrics[name]))
    if "perf/throughput" in metrics and (rates := metrics["perf/throughput"].finite):
        tiles.append(_tile("tokens / s", formatting.count(math.fsum(rates) / len(rates)), "", rates, ""))
    return "".join(tiles)


def _evaluation_tile(series: Series, last_step: int) -> str:
    """The last and the first evaluation, with the step of the last one if later steps were not evaluated."""
    found = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)]
    if not found:
        return ""
    step, value = found[-1]
    said = [f"at step {step}"] if len(found) == 1 or step != last_step else []
    said += [f"from {formatting.short(found[0][1])}"] if len(found) > 1 else []
    return _tile(eval_label(series.name), formatting.short(value), ", ".join(said), series.finite, "hero")


def _change_tile(label: str, series: Series) -> str:
    """The start and the end of a metric, each averaged over some steps, because single steps are noisy."""
    numbers = series.finite
    if not numbers:
        return ""
    over = max(1, min(_HEADLINE_STEPS, len(numbers) // 2))
    first, last = math.fsum(numbers[:over]) / over, math.fsum(numbers[-over:]) / over
    before = f"from {formatting.short(first)}" if len(numbers) > 1 else ""
    means = f" (means of {over} steps)" if over > 1 else ""
    return _tile(label, formatting.short(last), f"{before}{means}", numbers, "")


def _tile(label: str, value: str, before: str, numbers: Sequence[float], kind: str) -> str:
    return (
        f'<div class="tile {kind}"><p class="label">{shown(label)}</p><p class="value">{value}'
        f"<small>{before}</small></p>{sparkline(numbers)}</div>"
    )


def _curves(record: RunRecord) -> str:
    cards = "".join(chart_card(chart) for chart in charts(record.metrics))
    if not cards:
        return '<section><h2>Curves</h2><p class="note">This run has written no metrics yet.</p></section>'
    return f'<section><h2>Curves</h2><div class="grid">{cards}</div></section>'


def _others(record: RunRecord) -> str:
    moving, constant = other_charts(record.metrics)
    if not moving and not constant:
        return ""
    cards = "".join(chart_card(chart) for chart in moving)
    rows = "".join(
        f"<tr><td>{shown(name)}</td><td>{formatting.short(value)}</td></tr>" for name, value in constant.items()
    )
    table = f'<p class="note">Constant over the run</p><table class="figures">{rows}</table>' if rows else ""
    return (
        f"<section><details><summary>All other metrics ({len(moving) + len(constant)})</summary>"
        f'<div class="grid">{cards}</div>{table}</details></section>'
    )


def _asset(name: str) -> str:
    return (files("hybridflow.observability.report") / "assets" / name).read_text(encoding="utf-8")
