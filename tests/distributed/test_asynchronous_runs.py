"""Asynchronous runs of the built-in task learn it."""

from pathlib import Path

import pytest

from tests.distributed.runs import metric_rows, run_here

ACCURACY = "val-core/calculator/acc/mean@1"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 2])
def test_exact_match_rises_on_older_samples(tmp_path: Path, staleness: int):
    settings = ["algorithm=grpo", f"asynchrony={{max_staleness: {staleness}, ahead: 2}}", "trainer.trackers=[jsonl]"]
    settings += ["actor.optimizer.learning_rate=1e-4"]  # that of the task, 3e-4, is too high for older samples
    settings += [f"trainer={{total_steps: 30, eval_every: 30, save_every: 0, run_dir: {tmp_path}/run}}"]
    ended = run_here(settings)
    assert ended.status == 0, ended.said
    rows = metric_rows(tmp_path / "run")
    assert rows[0][ACCURACY] + 0.05 < rows[-1][ACCURACY]  # 0.44 to 0.63 and 0.59
    assert max(row.get("async/staleness/max", 0.0) for row in rows) == staleness
