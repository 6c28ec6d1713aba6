"""The charts of the report: which metrics they show, in which order, and a note on how to read each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.observability.report.charts import COLORS, Chart
from hybridflow.observability.report.record import Series


@dataclass(frozen=True)
class _Entry:
    title: str
    names: str
    note: str
    is_log: bool = False


_ENTRIES = (
    _Entry("Score", r"critic/score/mean", "Mean score of the sampled responses; the thick line is smoothed."),
    _Entry("Evaluation", r"val-core/(?:.+/)?(?!loss$|margin$|perplexity$)[^/]+", "Mean over held-out data."),
    _Entry("Loss", r"(?:.+/)?loss", "Mean loss."),
    _Entry(
        "Preferences",
        r"rewards/(?:accuracies|margins|chosen|rejected)|val-core/.+/margin",
        "Rewards of the chosen and the rejected responses.",
    ),
    _Entry("KL", r"actor/(?:ppo_kl|kl_loss|kl|kl_to_reference|reward_kl_penalty)", "Per token, in nats."),
    _Entry("Entropy", r"actor/entropy(?:_loss)?", "Nats per token; near zero, the policy no longer explores."),
    _Entry("Response length", r"response_length/(?:mean|max|min)", "Tokens per response."),
    _Entry("Turns per episode", r"num_turns/(?:mean|max|min)", "Replies of the model."),
    _Entry(
        "Environment",
        r"environment/info/.+",
        "Numbers that the environment returned, over the episodes that have them.",
    ),
    _Entry("Policy loss", r"actor/pg_loss", "Policy-gradient loss."),
    _Entry("Value loss", r"critic/vf_loss", "Squared error of the critic."),
    _Entry("Explained variance", r"critic/vf_explained_var", "Of the returns, by the critic; 1 is perfect."),
    _Entry("Gradient norms", r"(?:actor|critic)/grad_norm", "Global norm before clipping."),
    _Entry("Clipped fraction", r"actor/pg_clipfrac|critic/vf_clipfrac", "Share of tokens outside the clip range."),
    _Entry("Largest probability ratio", r"actor/ratio_max", "Of a token, after and before the update.", is_log=True),
    _Entry(
        "Rollout versus training",
        r"training/rollout_(?:log)?probs_diff_(?:max|mean)",
        "Difference between the token probabilities of the rollout engine and the training engine.",
        is_log=True,
    ),
    _Entry("Learning rates", r"(?:actor|critic)/lr", ""),
    _Entry(
        "Staleness",
        r"async/staleness/(?:mean|max|p95)",
        "Versions between the weights that sampled a token and those that are trained on it.",
    ),
    _Entry(
        "Groups ahead",
        r"async/groups/(?:waiting|running|done)",
        "Groups of later steps that wait for a place, are generated, or are ready.",
    ),
    _Entry("Throughput", r"perf/throughput", "Tokens per second per device."),
    _Entry("Idle pools", r"perf/idle_fraction/.+", "Fraction of a step in which no rank of the pool works."),
)

_NOT_CHARTED = re.compile(r"timing_s/(?!reshard).*|training/global_step")


def charts(metrics: Mapping[str, Series]) -> list[Chart]:
    """The main charts, of the metrics that the run has."""
    found = []
    for entry in _ENTRIES:
        series = [metrics[name] for name in _matching(metrics, entry.names)][:COLORS]
        if series:
            is_smoothed = entry.title != "Evaluation" and len(series) < 3
            found.append(Chart(entry.title, series, entry.note, is_log=entry.is_log, is_smoothed=is_smoothed))
    return found


def other_charts(metrics: Mapping[str, Series]) -> tuple[list[Chart], dict[str, float]]:
    """A chart for each metric that no main chart shows, and the values of those that never change."""
    shown = {name for entry in _ENTRIES for name in _matching(metrics, entry.names)[:COLORS]}
    rest = [
        series for name, series in sorted(metrics.items()) if name not in shown and not _NOT_CHARTED.fullmatch(name)
    ]
    moving = [Chart(series.name, [series]) for series in rest if not _is_constant(series.finite)]
    return moving, {series.name: series.finite[0] for series in rest if series.finite and _is_constant(series.finite)}


def charts_of_runs(runs: Mapping[str, Mapping[str, Series]]) -> tuple[list[Chart], list[Chart]]:
    """A chart per metric with one line per run: those of the main charts, then the others that several runs have.

    A main metric that only one run has is drawn too, since runs of different dataflows share few.
    """
    names = dict.fromkeys(name for metrics in runs.values() for name in metrics)
    main: dict[str, _Entry] = {}
    for entry in _ENTRIES:
        main |= {name: entry for name in names if re.fullmatch(entry.names, name) and name not in main}
    rest = [
        name
        for name in sorted(names)
        if name not in main and not _NOT_CHARTED.fullmatch(name)
        and sum(name in metrics for metrics in runs.values()) > 1
        and not _is_constant([value for metrics in runs.values() if name in metrics for value in metrics[name].finite])
    ]  # fmt: skip
    titled = [_chart_of_runs(runs, name, entry) for name, entry in main.items()]
    return titled, [_chart_of_runs(runs, name, _Entry(name, "", "")) for name in rest]


def _chart_of_runs(runs: Mapping[str, Mapping[str, Series]], name: str, entry: _Entry) -> Chart:
    series = []
    for run, metrics in runs.items():
        found = metrics.get(name)
        series.append(Series(run, found.steps, found.values) if found else Series(run, [], []))
    is_smoothed = entry.title != "Evaluation"
    note = "" if entry.title == name else name
    return Chart(entry.title, series, note, is_log=entry.is_log, is_smoothed=is_smoothed, of_runs=True)


def _is_constant(values: list[float]) -> bool:
    """Whether there are no values, or they differ by no more than float32 rounds."""
    return not values or max(values) - min(values) <= 1e-6 * max(map(abs, values))


def _matching(metrics: Mapping[str, Series], pattern: str) -> list[str]:
    return [name for name in metrics if re.fullmatch(pattern, name)]
