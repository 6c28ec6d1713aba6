"""Timers, throughput and memory."""

import sys

import pytest

from hybridflow.observability.metrics import plain
from hybridflow.observability.performance import StageTimers, memory_metrics, throughput


def test_nested_stages_are_measured_inside_the_step():
    timers = StageTimers()
    with timers.stage("step"), timers.stage("gen"):
        sum(range(1000))
    metrics = plain(timers.metrics())
    assert list(metrics) == ["timing_s/gen", "timing_s/step"]
    assert 0.0 < metrics["timing_s/gen"] <= metrics["timing_s/step"]


def test_a_stage_entered_twice_adds_up_and_reset_forgets():
    timers = StageTimers()
    timers.add("reward", 1.5)
    timers.add("reward", 2.0)
    assert timers.seconds("reward") == 3.5
    timers.reset()
    assert timers.metrics() == {}


def test_a_stage_that_raises_is_measured_and_left():
    stages = []
    timers = StageTimers(on_stage=stages.append)
    with pytest.raises(RuntimeError), timers.stage("step"), timers.stage("gen"):
        raise RuntimeError
    assert set(timers.metrics()) == {"timing_s/gen", "timing_s/step"}
    assert stages == ["step", "gen", "step", None]


def test_throughput_is_tokens_a_second_and_device():
    metrics = plain(throughput(12_000, 2.0, 40, devices=4))
    assert metrics == {
        "perf/total_num_tokens": 12_000.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 1500.0,
        "perf/samples_per_second": 20.0,
    }
    assert plain(throughput(10, 0.0, 1))["perf/throughput"] == 0.0


def test_memory_is_that_of_this_process():
    metrics = plain(memory_metrics())
    assert 0.0 < metrics["perf/process_memory_gb"] < metrics["perf/cpu_memory_used_gb"] * 4
    assert metrics["perf/process_memory_peak_gb"] >= 0.9 * metrics["perf/process_memory_gb"]


def test_asking_for_memory_does_not_import_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "perf/max_memory_allocated_gb" not in memory_metrics()
    assert "torch" not in sys.modules
