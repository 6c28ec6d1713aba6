import json
import os
from pathlib import Path

import pytest
import torch

from hybridflow.config.data import Data
from hybridflow.data import load_prompts
from hybridflow.errors import DataError
from hybridflow.rewards.factory import row_checks


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_become_columns_of_a_batch(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+1=", "answer": "11"}]
    batch = load_prompts([written(tmp_path / "sums.jsonl", rows)], Data(), tokenizer)
    assert batch.objects == {"prompt": ["1+1=", "10+1="], "answer": ["2", "11"], "data_source": ["sums", "sums"]}
    prompts = batch.tokens("prompt_ids")
    assert prompts.values.dtype == torch.int64
    assert [tokenizer.decode(row).replace(" ", "") for row in prompts.rows()] == ["1+1=", "10+1="]


def test_files_with_different_columns_stand_one_after_the_other(tmp_path, tokenizer):
    first = written(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1", "level": 3}])
    second = written(tmp_path / "b.jsonl", [{"question": "y", "answer": "2"}])
    batch = load_prompts([first, second], Data(), tokenizer)
    assert batch.object("prompt") == ["x", "y"]
    assert batch.object("data_source") == ["a", "b"]
    assert (batch.object("level"), batch.object("question")) == ([3, None], [None, "y"])


@pytest.mark.parametrize(("prompt", "flaw"), [(None, "is missing"), ("", "is empty")])
def test_a_bad_prompt_is_named_with_its_row_and_file(tmp_path, tokenizer, prompt, flaw):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": prompt}])
    with pytest.raises(DataError, match=rf"row 2 of '.*a.jsonl' {flaw}") as caught:
        load_prompts([path], Data(), tokenizer)
    assert "messages such as" in caught.value.remedy


def test_long_prompts_are_counted_and_refused(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x" * n} for n in (3, 9, 4, 12)])
    with pytest.raises(DataError) as caught:
        load_prompts([path], Data(max_prompt_tokens=8), tokenizer)
    assert caught.value.message == (
        f"2 of 4 prompts are longer than data.max_prompt_tokens=8 tokens (the longest, row 4 of '{path}', has 12)."
    )
    assert caught.value.remedy.startswith("Set data.max_prompt_tokens=12 if the model reads as many, or data.drop")


def test_long_prompts_are_left_out_when_asked_and_the_warning_counts_them(tmp_path, tokenizer, caplog):
    rows = [{"prompt": "x" * n, "answer": n, "level": -n} for n in (3, 9, 4, 12)]
    path = written(tmp_path / "a.jsonl", rows)
    batch = load_prompts([path], Data(max_prompt_tokens=8, drop_long_prompts=True), tokenizer)
    assert (batch.object("answer"), batch.object("level")) == ([3, 4], [-3, -4])
    assert batch.tokens("prompt_ids").lengths.tolist() == [3, 4]
    assert "data.drop_long_prompts=true leaves out 2 of 4 prompts" in caplog.text
    assert "2 of 4 rows are left (50 %)" in caplog.text


@pytest.mark.parametrize("short", [0, 4])
def test_next_to_nothing_left_after_dropping_is_an_error(tmp_path, tokenizer, short):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x"}] * short + [{"prompt": "xxx"}] * 96)
    with pytest.raises(DataError, match=rf"^{short} of {96 + short} rows are left \({short} %\)") as caught:
        load_prompts([path], Data(max_prompt_tokens=2, drop_long_prompts=True), tokenizer)
    assert "Raise data.max_prompt_tokens" in caught.value.remedy


def test_no_files_are_an_error(tokenizer):
    with pytest.raises(DataError, match="No data files") as caught:
        load_prompts([], Data(), tokenizer)
    assert "data.train_files" in caught.value.remedy


def test_rows_without_an_answer_are_told_where_the_reward_needs_one(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1"}, {"prompt": "y"}, {"prompt": "z"}])
    with pytest.raises(DataError, match=r"2 of 3 rows have no answer.*\[gsm8k\].* the first is row 2 of") as caught:
        load_prompts([path], Data(), tokenizer, judges_of_answers=["gsm8k"])
    assert "data.answer_key" in caught.value.remedy
    assert len(load_prompts([path], Data(), tokenizer)) == 3


def test_texts_become_conversations_when_asked(tmp_path, chat_tokenizer):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x"}])
    batch = load_prompts([path], Data(as_chat=True), chat_tokenizer)
    assert batch.object("prompt") == [[{"role": "user", "content": "x"}]]
    found = chat_tokenizer.convert_ids_to_tokens(batch.tokens("prompt_ids").row(0).tolist())
    assert "".join(found) == "[user:x]<eos>[assistant:"


@pytest.mark.skipif("HYBRIDFLOW_ASSETS" not in os.environ, reason="needs HYBRIDFLOW_ASSETS")
@pytest.mark.parametrize(
    ("file", "rows", "prompt_key"),
    [("gsm8k/test.jsonl", 1319, None), ("math/math500.jsonl", 500, None), ("svamp/test.jsonl", 1000, "Question")],
)
def test_real_data_sets_are_recognised(tokenizer, file, rows, prompt_key):
    path = Path(os.environ["HYBRIDFLOW_ASSETS"]) / "data" / file
    config = Data(max_prompt_tokens=5000, prompt_key=prompt_key, answer_key="Answer" if prompt_key else None)
    batch = load_prompts([str(path)], config, tokenizer)
    assert len(batch) == rows
    assert None not in batch.object("answer")


@pytest.mark.parametrize(
    ("tests", "said"), [(["pass"], "Every program passes the tests"), ("[" * 100_000, "cannot parse the tests")]
)
def test_a_row_that_code_tests_cannot_judge_is_found_before_training(tmp_path, tokenizer, tests, said):
    rows = [{"prompt": "p", "tests": each} for each in (["assert f(1) == 2"], None, tests)]
    path = written(tmp_path / "problems.jsonl", rows)
    with pytest.raises(DataError, match=rf"row 3 of '.*problems.jsonl': .*{said}") as caught:
        load_prompts([path], Data(), tokenizer, row_checks=row_checks(["gsm8k", "code_tests", "own.py:f"]))
    assert "a list of assert statements" in caught.value.remedy
    assert len(load_prompts([path], Data(), tokenizer, row_checks=row_checks(["gsm8k"]))) == 3
