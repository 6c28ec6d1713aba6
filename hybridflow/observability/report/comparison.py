"""Several runs on one page: how they ended, their evaluations, settings that differ, curves, and samples."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.observability import formatting
from hybridflow.observability.printable import shown
from hybridflow.observability.progress import eval_label
from hybridflow.observability.report.catalogue import charts_of_runs
from hybridflow.observability.report.charts import COLORS, chart_card
from hybridflow.observability.report.config import differing_settings
from hybridflow.observability.report.document import html_page, html_table
from hybridflow.observability.report.record import RunRecord, Series
from hybridflow.observability.report.samples import samples_of_runs

_MAX_EVALUATIONS = 4
_LOW_IS_GOOD = ("/loss", "/perplexity")
_SCORES = {"critic/score/mean": "training score", "train/loss": "training loss"}
_RECENT_STEPS = 5
_MAX_SAID = 160


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """A name for each run: its directory's, or the path that was given where two have the same."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return [str(path) if names.count(name) > 1 else name for path, name in zip(run_dirs, names, strict=True)]


def comparison_page(runs: Mapping[str, RunRecord], *, is_renewed: bool = False) -> str:
    """The page that compares runs, by name; `is_renewed`: it is written again while it is open."""
    main, others = charts_of_runs({name: record.metrics for name, record in runs.items()})
    curves = "".join(map(chart_card, main)) or '<p class="note">These runs have written no metrics yet.</p>'
    body = (
        f'<header><p class="eyebrow">Comparison</p><h1>{len(runs)} runs</h1></header>{_table(runs)}'
        f"{differing_settings({name: record.config_text for name, record in runs.items()})}"
        f'<section><h2>Curves</h2><div class="grid">{curves}</div></section>{samples_of_runs(runs)}'
    )
    if others:
        body += (
            f'<section><details id="other-metrics"><summary>Other metrics that several runs have ({len(others)})'
            f'</summary><div class="grid">{"".join(map(chart_card, others))}</div></details></section>'
        )
    return html_page(f"{', '.join(runs)} - comparison", body, is_renewed=is_renewed)


def _table(runs: Mapping[str, RunRecord]) -> str:
    metrics = dict.fromkeys(name for record in runs.values() for name in record.metrics)
    evaluations = [name for name in metrics if name.startswith("val-core/")][:_MAX_EVALUATIONS]
    scores = [name for name in _SCORES if name in metrics]
    titles = ["run", "ended", "steps", "time", *map(eval_label, evaluations), *(_SCORES[name] for name in scores)]
    rows = []
    for place, (name, record) in enumerate(runs.items()):
        cells = [f'<i class="key c{place % COLORS}"></i>{shown(name)}', _ended(record), str(record.last_step)]
        cells.append(formatting.spoken_duration(record.seconds) if record.seconds else "")
        cells += [_evaluation(record.metrics.get(metric)) for metric in evaluations]
        cells += [_recent(record.metrics.get(metric)) for metric in scores]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<section>{html_table('runs', titles, rows)}</section>"


def _ended(record: RunRecord) -> str:
    ending = record.ending
    if ending is None:
        return '<b class="ending running">running</b>'
    said = ""
    if ending.how != "done":
        cut = ending.said.partition(" What to do:")[0]
        cut = cut if len(cut) <= _MAX_SAID else f"{cut[:_MAX_SAID]}\u2026"
        said = f'<br/><small title="{shown(ending.said)}">{shown(cut)}</small>'
    warnings = "".join(f"<br/><small>{shown(advice.message)}</small>" for advice in record.diagnosed())
    return f'<b class="ending {shown(ending.how)}">{shown(ending.how)}</b>{said}{warnings}'


def _evaluation(series: Series | None) -> str:
    """The last evaluation, and the best one if that is another."""
    if series is None or not (found := series.points):
        return ""
    at, last = found[-1]
    sign = 1.0 if series.name.endswith(_LOW_IS_GOOD) else -1.0
    best_at, best = min(found, key=lambda point: (sign * point[1], point[0]))
    other = f"best {formatting.short(best)} at step {best_at}" if best != last else "the best"
    other = "" if len(found) == 1 else f"<br/><small>{other}</small>"
    return f"<b>{formatting.short(last)}</b> <small>at step {at}</small>{other}"


def _recent(series: Series | None) -> str:
    recent = series.finite[-_RECENT_STEPS:] if series else []
    if not recent:
        return ""
    over = f" <small>mean of {len(recent)} steps</small>" if len(recent) > 1 else ""
    return f"{formatting.short(math.fsum(recent) / len(recent))}{over}"
