"""benchmarks/scale.py: real messages to stand-in workers, whose number and size grow no faster than ranks and rows."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from benchmarks.record import environment

ROOT = Path(__file__).resolve().parents[2]


@cache
def measured(layout: str, ranks: int, rows: int, steps: int = 0) -> dict:
    command = [sys.executable, "benchmarks/scale_round.py", "--layout", layout, "--ranks", str(ranks)]
    command += ["--rows", str(rows), "--repeats", "1", "--steps", str(steps)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_calls_send_a_message_per_rank_and_bytes_that_grow_with_the_rows(layout):
    costs = measured(layout, 16, 1024)["costs"]
    assert costs["empty"]["messages"] == costs["update"]["messages"] == 16
    more = measured(layout, 32, 2048)["costs"]
    for name, cost in costs.items():
        assert more[name]["bytes"] <= 2.2 * cost["bytes"], name
        assert more[name]["messages"] <= 2.2 * cost["messages"], name


def test_the_objects_of_a_step_are_dropped_with_it():
    memory = measured("data", 4, 128, steps=20)["memory"]
    assert memory["objects_20"] <= memory["objects_5"] and memory["object_bytes_20"] <= 1.1 * memory["object_bytes_5"]
