"""The table of `benchmarks/chaos.py`."""

import random

from benchmarks.chaos import DEFAULT, LAYOUTS, VLLM, Line, Moments, table

FAULT = {"fault": "WorkerDied", "role": "rollout+reward", "seconds": 4.0, "cost_seconds": 5.0}


def _line(layout, seconds):
    faults = [FAULT | {"seconds": seconds}]
    return Line(layout, 1, True, True, {"SIGKILL": 1}, faults, 100.0, 90.0, "")


def test_the_recoveries_of_a_rollout_with_vllm_are_apart():
    rows = [text.split() for text in table([_line("apart", 4.0), _line(VLLM, 30.0)])]
    assert ["a", "rollout", "process", "1", "4.0", "4.0", "5.0", "5.0"] in rows
    assert ["a", "rollout", "process", "with", "vLLM", "1", "30.0", "30.0", "5.0", "5.0"] in rows


def test_the_layout_with_vllm_does_not_change_the_seeds_of_the_others():
    assert DEFAULT == ("together", "apart", "critic") and set(LAYOUTS) == {*DEFAULT, VLLM}


def test_faults_are_as_far_apart_as_is_asked():
    choose, moments = random.Random(0), Moments(seconds=2.0, least=25.0)
    pauses = [moments.pause(choose) for _ in range(200)]
    assert 25.0 <= min(pauses) < max(pauses) <= 33.0
