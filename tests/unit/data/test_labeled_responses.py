import pytest

from hybridflow.config.data import Data
from hybridflow.data import load_labeled
from hybridflow.errors import DataError
from tests.unit.data.conftest import texts, written

USER, GOOD = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
ROW = {"prompt": "a", "completion": "b", "label": True}


def loaded(path, tokenizer, rows):
    return load_labeled([written(path, rows)], Data(), tokenizer)


@pytest.mark.parametrize(
    "rows",
    [
        [ROW, ROW | {"completion": 3, "label": 0}, {"prompt": "d", "completion": "e", "label": 1.0}],
        [{"prompt": "a", "chosen": "b", "rejected": 3}, {"prompt": "d", "chosen": "e", "rejected": "f"}],
    ],
)
def test_labeled_responses_and_both_responses_of_pairs(tmp_path, tokenizer, rows):
    batch = loaded(tmp_path / "a.jsonl", tokenizer, [{**row, "topic": row["prompt"]} for row in rows])
    assert batch.object("prompt")[:3] == batch.object("topic")[:3] == ["a", "a", "d"]
    assert texts(tokenizer, batch.tokens("prompt_ids").rows())[:3] == ["a", "a", "d"]
    assert texts(tokenizer, batch.tokens("response_ids").rows())[:3] == ["b<eos>", "3<eos>", "e<eos>"]
    assert batch.row("is_chosen").tolist() == [True, False, True, False][: len(batch)]


@pytest.mark.parametrize(
    ("row", "message", "remedy"),
    [
        ({"label": "good"}, "The label in row 2 of", "Give true"),
        ({"label": "true"}, "is the text 'true'", "without quotes"),
        ({"label": None}, "The label in row 2 of", "Give true"),
        ({"completion": ""}, "Row 2 of .* has a completion that is empty", "leave the row"),
        ({"completion": {"x": 1}}, "Row 2 of .* has a completion that is of type dict", "text"),
        ({"prompt": "hi", "completion": [USER]}, "Row 2 of .* has an empty completion", "Write what"),
        ({"prompt": "hi", "completion": [GOOD, USER]}, "Row 2 of .* does not end with", "End it"),
        ({"prompt": "so", "completion": [USER, GOOD]}, "begins with the turn of 'user'", "as messages"),
        ({"prompt": None}, "Row 2 of .* has a prompt that is missing", "Give text"),
    ],
)
def test_a_faulty_row_is_named(tmp_path, tokenizer, row, message, remedy):
    with pytest.raises(DataError, match=f"{message}.*{remedy}"):
        loaded(tmp_path / "a.jsonl", tokenizer, [ROW, ROW | row])


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("hi", [GOOD]), ("hi", [USER, GOOD]), ([USER], "yo"), ([USER], [GOOD]), ([USER], [USER, GOOD])],
)
def test_conversations_may_repeat_the_prompt(tmp_path, chat_tokenizer, prompt, completion):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [ROW | {"prompt": prompt, "completion": completion}, ROW])
    assert batch.object("prompt")[0] == [USER]
    assert texts(chat_tokenizer, batch.tokens("prompt_ids").rows())[0] == "[user:hi]<eos>[assistant:"
    assert texts(chat_tokenizer, batch.tokens("response_ids").rows())[0] == "yo]<eos>"


def test_texts_that_repeat_their_prompts_are_cut_and_counted(tmp_path, tokenizer, caplog):
    rows = [ROW | {"prompt": "1+1=", "completion": f"1+1={more}"} for more in (" 2", "")]
    batch = loaded(tmp_path / "a.jsonl", tokenizer, [*rows, ROW | {"label": False}])
    assert texts(tokenizer, batch.tokens("response_ids").rows()) == [" 2<eos>", "1+1=<eos>", "b<eos>"]
    assert "1 of 3 responses begin with their prompt, which is cut off" in caplog.text


def test_blank_completions_are_left_out_with_their_labels_and_counted(tmp_path, chat_tokenizer, caplog):
    silent = [{"role": "assistant", "content": None}]
    cells = (("a", " ", True), ("b", "x", False), ("c", "\n", True), ("d", silent, True), ("e", "y", True))
    rows = [{"prompt": p, "completion": completion, "label": label, "topic": p} for p, completion, label in cells]
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, rows)
    assert batch.row("is_chosen").tolist() == [False, True]
    assert batch.object("prompt") == batch.object("topic") == ["b", "e"]
    assert "leaves out 3 of 5 rows: blank completions (rows 1, 3, 4)" in caplog.text
    with pytest.raises(DataError, match=r"no usable rows: blank completions \(2\).*with text to learn"):
        loaded(tmp_path / "b.jsonl", chat_tokenizer, [rows[0], rows[2]])


def test_a_file_without_labels_is_an_error(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no labeled responses.*prompt, completion and label"):
        loaded(tmp_path / "a.jsonl", tokenizer, [{"prompt": "a", "completion": "b"}])


def test_one_label_in_every_row_is_logged(tmp_path, tokenizer, caplog):
    loaded(tmp_path / "a.jsonl", tokenizer, [ROW, ROW | {"label": 1}])
    assert "every label is true" in caplog.text
