"""Fingerprints of what a run reads, by the names that the user wrote."""

import pytest

from hybridflow.config.loop import ResumeChanged
from hybridflow.elastic.compatibility import Fingerprints, check_unchanged
from hybridflow.errors import CheckpointError
from hybridflow.launch.resume import fingerprints
from tests.unit.launch.plans import planned

WORDS = [
    "algorithm=grpo", "data={train_files: [sums.jsonl, more.jsonl], max_prompt_tokens: 8, max_response_tokens: 4}",
    "reward.functions=[judge.py:right]",
]  # fmt: skip


def test_a_copy_of_a_run_is_compared_with_the_files_that_it_reads_there(tmp_path, monkeypatch):
    def taken(copy: str, content: str) -> Fingerprints:
        folder = tmp_path / copy
        folder.mkdir()
        (folder / "sums.jsonl").write_text(content)
        (folder / "more.jsonl").write_text("{}")
        (folder / "judge.py").write_text("def right(completions, **columns): return [0.0] * len(completions)")
        monkeypatch.chdir(folder)
        plan = planned(*WORDS)
        assert plan.config.data.train_files == [str(folder / "sums.jsonl"), str(folder / "more.jsonl")]
        return fingerprints(plan)

    first = taken("first", '{"prompt": "1+1="}')
    assert {"sums.jsonl", "more.jsonl", "judge.py"} <= first.keys()
    assert check_unchanged(first, taken("same", '{"prompt": "1+1="}'), ResumeChanged.refuse) == []
    with pytest.raises(CheckpointError, match=r"have changed since the checkpoint was written: sums\.jsonl\."):
        check_unchanged(first, taken("other", '{"prompt": "9+9="}'), ResumeChanged.refuse)
