"""The recipe of grade-school problems, shortened, on a toy with a chat template and problems made up here."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from recipes import grpo_gsm8k
from tests.distributed.runs import metric_rows, run_well, sample_rows
from tests.toys import MakeToy

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHORT = [
    "trainer={total_steps: 2, threads: 1, device: cpu, trackers: [jsonl]}",
    "data={max_response_tokens: 24, eval_limit: 2}",
]


@pytest.fixture
def chat_model(toy_dir: MakeToy, tmp_path: Path) -> Path:
    """A toy that reads 512 characters, in turns."""
    directory = shutil.copytree(toy_dir(max_position_embeddings=512), tmp_path / "chat_model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def write_problems(folder: Path) -> Path:
    """Eight problems in GSM8K's form, with answers of one digit."""
    rows = [
        {"question": f"tom has {n} figs and eats one. how many are left?", "answer": f"{n}-1={n - 1}.\n#### {n - 1}"}
        for n in range(1, 9)
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_it_runs_on_a_toy(chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    words = ["grpo_gsm8k.py", str(chat_model), str(write_problems(tmp_path)), "--cpu", *SHORT]
    monkeypatch.setattr(sys, "argv", words)
    run_well([], command=lambda _: grpo_gsm8k.main())
    rows = metric_rows(tmp_path / grpo_gsm8k.RUN_DIR)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0.0 <= row["rewards/gsm8k/mean"] <= 1.0
        assert 0.0 <= row["rewards/marked/mean"] <= 0.1
        assert -1.0 <= row["rewards/overlong/mean"] < 0.0
        assert row["dapo/prompts_drawn"] == 4 * (1 + row["dapo/refills"])
        assert math.isfinite(row["actor/pg_loss"])
        assert math.isfinite(row["actor/grad_norm"])
    assert max(row["actor/grad_norm"] for row in rows) > 0.0
    for row in sample_rows(tmp_path / grpo_gsm8k.RUN_DIR):
        assert row["prompt"].startswith("system: ") and row["prompt"].endswith("assistant: ")
        assert "#### " in row["prompt"] and row["answer"] in "01234567"


def test_a_marked_answer_is_one_line_with_a_number():
    texts = ["2 + 2 = 4\n#### 4", "#### 1\n#### 2", "#### four", "so 4", "#### $1,200"]
    assert grpo_gsm8k.marked(completions=texts) == [0.1, 0.0, 0.0, 0.0, 0.1]
    assert grpo_gsm8k.marked(completions=[[{"role": "assistant", "content": "#### 4"}]]) == [0.1]
