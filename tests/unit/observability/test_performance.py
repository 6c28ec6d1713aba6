"""Timers, throughput and memory."""

import sys

import pytest

from hybridflow.observability.metrics import plain
from hybridflow.observability.performance import StageTimers, memory_metrics, throughput


def test_nested_stages_are_measured_even_if_one_raises_and_reset_forgets_them():
    stages = []
    timers = StageTimers(on_stage=stages.append)
    with pytest.raises(RuntimeError), timers.stage("step"), timers.stage("gen"):
        sum(range(1000))
        raise RuntimeError
    metrics = plain(timers.metrics())
    assert list(metrics) == ["timing_s/gen", "timing_s/step"]
    assert 0.0 < metrics["timing_s/gen"] <= metrics["timing_s/step"]
    assert stages == ["step", "gen", "step", None]
    timers.reset()
    timers.add("reward", 1.5)
    timers.add("reward", 2.0)
    assert plain(timers.metrics()) == {"timing_s/reward": 3.5}


def test_throughput_is_tokens_a_second_and_device():
    metrics = plain(throughput(12_000, 2.0, 40, devices=4))
    assert metrics == {
        "perf/total_num_tokens": 12_000.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 1500.0,
        "perf/samples_per_second": 20.0,
    }
    assert plain(throughput(10, 0.0, 1))["perf/throughput"] == 0.0


def test_memory_is_that_of_this_process_and_does_not_import_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    metrics = plain(memory_metrics())
    assert 0.0 < metrics["perf/process_memory_gb"] < metrics["perf/cpu_memory_used_gb"] * 4
    assert metrics["perf/process_memory_peak_gb"] >= 0.9 * metrics["perf/process_memory_gb"]
    assert "perf/max_memory_allocated_gb" not in metrics and "torch" not in sys.modules
