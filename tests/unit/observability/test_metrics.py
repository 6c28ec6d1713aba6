"""Metrics reduce by what each declares."""

import pytest

from hybridflow.observability.metrics import (
    Measure,
    SentMetrics,
    last,
    maximum,
    mean,
    merge,
    merge_sent,
    minimum,
    plain,
    summary,
    total,
)


def test_means_are_weighted_and_may_be_merged_in_parts():
    parts = [{"loss": mean(value, weight)} for value, weight in ((1.0, 1), (2.0, 5), (4.0, 2))]
    assert merge(parts)["loss"] == merge([merge(parts[:2]), parts[2]])["loss"] == mean(19.0 / 8, 8)


def test_each_reduction_is_kept():
    parts = [
        {"tokens": total(3), "high": maximum(1), "low": minimum(1), "lr": last(0.1)},
        {"tokens": total(4), "high": maximum(7), "low": minimum(-2), "lr": last(0.2)},
    ]
    assert plain(merge(parts)) == {"tokens": 7.0, "high": 7.0, "low": -2.0, "lr": 0.2}


def test_a_mean_over_nothing_does_not_count():
    assert merge([{"loss": mean(9.0, 0)}, {"loss": mean(2.0, 4)}])["loss"].value == 2.0
    assert merge([{"loss": Measure(float("nan"), 0.0)}])["loss"] == mean(0.0, 0)


def test_a_name_with_two_reductions_is_our_bug():
    with pytest.raises(ValueError, match="more than one reduction"):
        merge([{"loss": mean(1.0)}, {"loss": total(1.0)}])


@pytest.mark.parametrize("last_part", [{}, {"loss": mean(3.0, 2)}, {"loss": mean(3.0, 2), "tokens": total(1)}])
def test_sent_metrics_are_merged_as_they_were_measured(last_part):
    parts = [{"loss": mean(float(value), value), "tokens": total(value)} for value in (0, 1, 5)]
    parts += [{"loss": mean(float("-inf"), 0.0), "tokens": total(0.1)}, last_part]
    assert merge_sent([SentMetrics.of(part) for part in parts]) == merge(parts)
    assert [SentMetrics.of(part).received() for part in parts] == parts


def test_summary_of_no_values_is_empty():
    assert summary("score", []) == {}
    assert plain(summary("score", [1.0, 4.0])) == {"score/mean": 2.5, "score/max": 4.0, "score/min": 1.0}
