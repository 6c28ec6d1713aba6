"""The benchmark of one GPU, rehearsed on a CPU: every section runs and reports numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = "engines,attention,offload,decode,update,learning,gsm8k"


@pytest.mark.slow
def test_every_section_runs_on_a_cpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--only", SECTIONS, "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (result,) = tmp_path.glob("gpu-*.json")
    sections = {section["section"]: section for section in json.loads(result.read_text())["sections"]}
    assert list(sections) == SECTIONS.split(",")
    assert all(section["problem"] is None and section["rows"] for section in sections.values())
    differences = [row["value"] for row in sections["engines"]["rows"] if "float32" in row["name"]]
    assert len(differences) >= 4 and max(differences) < 1e-4
    speeds = [row["value"] for row in sections["update"]["rows"] if row["unit"] == "tokens/s"]
    assert len(speeds) >= 4 and min(speeds) > 0


@pytest.mark.slow
def test_an_unknown_section_is_named(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--only", "engine", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "There is no section 'engine'. Sections: engines, attention" in done.stderr
