"""The memory that other systems have published, as `benchmarks/planning_rows.py` compares it."""

import pytest

from benchmarks.planning_memory import TOLERANCE, edges, rows, sections
from benchmarks.planning_report import shown
from hybridflow.mapping.memory.phases import GIB

SECTIONS = sections()


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_predictions_meet_the_criteria(section):
    assert [criterion.name for criterion in section.criteria if not criterion.is_met] == []


def test_both_runs_out_of_memory_are_predicted_and_every_larger_error_has_a_reason():
    compared = rows("compared")
    assert [row.name for row in compared if row.published is None] == [
        "H100 x1 Qwen3-0.6B sft 64k",
        "B200 x8 Qwen3-235B-A22B lora 64k",
    ]
    assert all(row.is_right for row in compared if row.published is None)
    assert all(row.why for row in compared if abs(row.error) > TOLERANCE)


def test_recommended_offloading_is_the_least_that_fits():
    assert all(edge.fits for edge in edges("published"))
    lacking = {edge.name: edge.phase for edge in edges("less_offloading") if edge.lacks > 0}
    assert lacking == {
        "DeepSeek-V3 on 96 t8 p12 e8 offload 0.5": "generating",
        "DeepSeek-V3 on 128 t8 p16 e8 offload 0": "updating actor",
        "Qwen3-235B-A22B on 32 t4 p8 e4 offload 0.5": "generating",
        "Qwen3-235B-A22B on 64 t4 p8 e4 offload 0": "generating",
    }


def test_the_published_minimum_of_devices_is_that_of_host_memory():
    deepseek, _, _, qwen, *_ = edges("published")
    assert [edge.host_lacks > 0 for edge in (deepseek, qwen, *edges("fewer_devices"))] == [False, False, True, True]


def test_measured_memory_is_predicted():
    (edge,) = [edge for edge in edges("published") if edge.measured]
    assert edge.measured == pytest.approx((edge.predicted * GIB / 1e9, edge.host * GIB / 1e9), rel=0.05)


def test_the_benchmark_shows_a_verdict_per_criterion():
    text = shown(SECTIONS)
    assert text.count("\npass  ") + text.count("\nFAIL  ") == sum(len(section.criteria) for section in SECTIONS)
