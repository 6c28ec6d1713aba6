"""benchmarks/profile_step.py runs, and its numbers add up."""

import json
import subprocess
import sys

import pytest

from benchmarks.record import HERE, environment


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_profile_of_one_step(tmp_path, algorithm):
    command = [sys.executable, "benchmarks/profile_step.py", "--steps", "1", "--warmup", "1", "--threads", "1"]
    command += ["--algorithm", algorithm, "--cache", str(tmp_path), "--results", str(tmp_path), "--record"]
    done = subprocess.run(
        command, cwd=HERE.parent, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (result,) = tmp_path.glob("profile_step-*.json")
    found = json.loads(result.read_text())
    whole, decoding = found["parts"]["whole step"], found["parts"]["decoding"]
    for part in (whole, decoding):
        assert sum(part["shares"].values()) == pytest.approx(1.0)
        assert min(part["shares"].values()) >= 0.0 and part["shares"]["matrix products"] > 0.0
    assert whole["shares"]["optimizer"] > 0.0 == decoding["shares"]["optimizer"]
    assert decoding["seconds"] < whole["seconds"] and found["decoding_products_alone_seconds"] > 0.0
    assert 5e9 < decoding["product_flops"] < 8e9  # 256 sequences of 48 tokens: 7.7e9, or 5.8e9 with prompts read once
    assert whole["product_flops"] > 2 * decoding["product_flops"]
