"""The report page: headline numbers, curves, timing, samples and configuration, in one file without other resources."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hybridflow.observability import formatting
from hybridflow.observability.ending import UNRECORDED
from hybridflow.observability.printable import shown
from hybridflow.observability.progress import eval_label
from hybridflow.observability.report.catalogue import charts, other_charts
from hybridflow.observability.report.charts import chart_card, sparkline
from hybridflow.observability.report.config import config_section
from hybridflow.observability.report.document import html_page
from hybridflow.observability.report.faults import faults_section
from hybridflow.observability.report.record import RunRecord, Series, read_record
from hybridflow.observability.report.samples import samples_section
from hybridflow.observability.report.timeline import timeline_section
from hybridflow.observability.report.timing import timing_section
from hybridflow.observability.whole_files import replace_file

_HEADLINE_STEPS = 5
_MAX_EVAL_TILES = 3


def write_report(run_dir: Path, *, is_over: bool = False) -> Path:
    """Writes `run_dir/report.html` from the files of the run directory, and returns its path.

    `is_over`: the run's process has ended, so a missing ending means that none was recorded. While the run has no
    ending, the page refreshes itself.
    """
    record = current_record(run_dir, is_over=is_over)
    return replace_file(run_dir / "report.html", report_page(record, is_renewed=record.ending is None))


def current_record(run_dir: Path, *, is_over: bool) -> RunRecord:
    """The record of a run directory; `is_over`: the run's process has ended, so that it has an ending."""
    record = read_record(run_dir)
    return replace(record, ending=UNRECORDED) if is_over and record.ending is None else record


def report_page(record: RunRecord, *, is_renewed: bool = False) -> str:
    """The whole page as HTML; `is_renewed`: it is written again while it is open, so it refreshes itself."""
    body = _header(record) + _curves(record) + faults_section(record.faults, record.seconds)
    body += timing_section(record.metrics) + timeline_section(record.trace)
    body += samples_section(record) + config_section(record.config_text) + _others(record)
    return html_page(f"{record.name} - run report", body, is_renewed=is_renewed)


def _header(record: RunRecord) -> str:
    return (
        f'<header><p class="eyebrow">Run report</p><h1>{shown(record.name)}</h1>'
        f'<p class="lead">{_sentence(record)}</p>{_ending(record)}{_warnings(record)}'
        f'<div class="tiles">{_tiles(record)}</div></header>'
    )


def _sentence(record: RunRecord) -> str:
    steps = formatting.counted(record.last_step, "step")
    took = f", which took {formatting.spoken_duration(record.seconds)}" if record.seconds else ""
    survived = [fault.cost_seconds for fault in record.faults if fault.is_survived]
    cost = formatting.spoken_duration(math.fsum(survived))
    lost = f"; {formatting.counted(len(survived), 'fault')} cost another {cost}"
    return f"{steps}{took}{lost if survived else ''}, last updated {record.written:%Y-%m-%d %H:%M}"


def _ending(record: RunRecord) -> str:
    """How the run ended, unless it was simply done."""
    ending = record.ending
    if ending is None or ending.how == "done":
        return ""
    return f'<p class="ending {shown(ending.how)}"><strong>{shown(ending.how)}</strong> {shown(ending.said)}</p>'


def _warnings(record: RunRecord) -> str:
    """Signs that nothing is being learned, and rows of data that are not used; then the run's other warnings."""
    found = [
        f'<p class="advice"><strong>{shown(advice.message)}</strong> What to do: {shown(advice.remedy)}</p>'
        for advice in record.diagnosed()
    ]
    found += [f'<p class="advice">{shown(message)}</p>' for message in dict.fromkeys(record.warnings.data)]
    others = "".join(f"<li>{shown(message)}</li>" for message in dict.fromkeys(record.warnings.others))
    if others:
        title = "Other warnings in run.log" if found else "Warnings in run.log"
        found.append(f'<details id="warnings"><summary>{title}</summary><ul>{others}</ul></details>')
    return "".join(found)


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
    if not (found := series.points):
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
    cards = "".join(chart_card(chart, record.faults) for chart in charts(record.metrics))
    if not cards:
        return '<section><h2>Curves</h2><p class="note">This run has written no metrics yet.</p></section>'
    return f'<section><h2>Curves</h2><div class="grid">{cards}</div></section>'


def _others(record: RunRecord) -> str:
    moving, constant = other_charts(record.metrics)
    if not moving and not constant:
        return ""
    cards = "".join(chart_card(chart, record.faults) for chart in moving)
    rows = "".join(
        f"<tr><td>{shown(name)}</td><td>{formatting.short(value)}</td></tr>" for name, value in constant.items()
    )
    table = f'<p class="note">Constant over the run</p><table class="figures">{rows}</table>' if rows else ""
    return (
        f'<section><details id="other-metrics"><summary>All other metrics ({len(moving) + len(constant)})</summary>'
        f'<div class="grid">{cards}</div>{table}</details></section>'
    )
