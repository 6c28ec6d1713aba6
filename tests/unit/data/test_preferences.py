import json
import logging

import pytest

from hybridflow.config.data import Data
from hybridflow.data.labelled import load_labelled
from hybridflow.data.pair_texts import common_beginning
from hybridflow.data.preferences import load_preferences, recognise_pairs
from hybridflow.data.prompts import load_prompts
from hybridflow.data.table import Table
from hybridflow.errors import DataError

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yo"), ("assistant", "no")))
TURNS = [USER, GOOD, {"role": "user", "content": "so"}]
HH = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: so\n\nAssistant:"
CHAT = "[user:hi]<eos>[assistant:"


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(path, tokenizer, rows, *, load=load_preferences, **settings):
    return load([written(path, rows)], Data(**settings), tokenizer)


def texts(batch, tokenizer, *names):
    columns = [batch.tokens(name).rows() for name in names]
    return [
        tuple("".join(tokenizer.convert_ids_to_tokens(row.tolist())) for row in rows)
        for rows in zip(*columns, strict=True)
    ]


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "<bos>1+1=", "2<eos>", "3<eos>"),
        ({"prompt": "1+1=", "chosen": 2, "rejected": 3}, "<bos>1+1=", "2<eos>", "3<eos>"),
        ({"question": "How?", "chosen": " So.", "rejected": " No."}, "<bos>How?", " So.<eos>", " No.<eos>"),
        ({"prompt": HH, "chosen": " yes", "rejected": " no"}, f"<bos>{HH}", " yes<eos>", " no<eos>"),
        ({"chosen": HH + " yes", "rejected": HH + " you"}, f"<bos>{HH}", " yes<eos>", " you<eos>"),
        ({"chosen": "It is blue.", "rejected": "It is bleak."}, "<bos>It is", " blue.<eos>", " bleak.<eos>"),
        ({"chosen": "1+1=12", "rejected": "1+1=13"}, "<bos>1+1=", "12<eos>", "13<eos>"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": [USER], "chosen": "yo", "rejected": "no"}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
    ],
)  # fmt: skip
def test_layouts_become_a_prompt_and_two_responses(tmp_path, chat_tokenizer, row, prompt, chosen, rejected):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row])
    found = texts(batch, chat_tokenizer, "prompt_ids", "chosen_ids", "rejected_ids")
    assert found == [(prompt, chosen, rejected)]
    assert batch.row("margin").tolist() == [0.0] and "ref_sums" not in batch


def test_turns_that_are_the_same_belong_to_the_prompt(tmp_path, chat_tokenizer):
    row = {"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row])
    assert batch.object("prompt") == [TURNS]
    assert texts(batch, chat_tokenizer, "chosen_ids") == [("yo]<eos>",)]


def test_numbers_beside_a_pair_are_kept(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "answer": "b", "topic": "x"}
    rows = [
        row | {"margin": 1.5, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0},
        row | {"margin": None, "ref_chosen_logps": -3, "ref_rejected_logps": -4.5},
    ]
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows)
    assert batch.row("margin").tolist() == [1.5, 0.0]
    assert batch.row("ref_sums").tolist() == [[-1.0, -2.0], [-3.0, -4.5]]
    assert (batch.object("answer"), batch.object("topic")) == (["b", "b"], ["x", "x"])
    assert batch.object("data_source") == ["a", "a"]


@pytest.mark.parametrize(
    ("row", "message", "remedy"),
    [
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "no chosen response", "leave the row out"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "no rejected response", "leave the row out"),
        ({"prompt": "a", "chosen": "b", "rejected": []}, "no rejected response", "leave the row out"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "a prompt that is empty", "Give text"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "one response as text and one as messages", "same way"),
        ({"prompt": "a", "chosen": {"x": 1}, "rejected": "b"}, "a chosen response that is a dict", "Give text"),
        ({"chosen": "yes", "rejected": "no"}, "no beginning in common", "prompt column"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "an empty rejected response", "drop it"),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]}, "does not end with the assistant", "be last"),
    ],
)
def test_a_faulty_pair_is_told_with_its_row(tmp_path, chat_tokenizer, row, message, remedy):
    fine = {"chosen": "x 1", "rejected": "x 2"} | ({"prompt": "p"} if "prompt" in row else {})
    with pytest.raises(DataError, match=message) as caught:
        loaded(tmp_path / "pairs.jsonl", chat_tokenizer, [fine, row])
    assert "Row 2 of '" in caught.value.message and remedy in caught.value.remedy


@pytest.mark.parametrize("value", ["much", True, float("nan")])
def test_a_margin_that_is_no_number_is_told(tmp_path, tokenizer, value):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": value}
    with pytest.raises(DataError, match="'margin' in row 1") as caught:
        loaded(tmp_path / "a.jsonl", tokenizer, [row])
    assert "leave the column" in caught.value.remedy


def test_a_file_without_pairs_is_told(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no column 'rejected'") as caught:
        loaded(tmp_path / "a.jsonl", tokenizer, [{"prompt": "a", "chosen": "b"}])
    assert "prompt, chosen and rejected" in caught.value.remedy


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": " \n", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    with caplog.at_level(logging.WARNING):
        batch = loaded(tmp_path / "a.jsonl", tokenizer, rows)
    assert len(batch) == 2
    assert "leaves out 1 of 4 pairs: both responses are the same (rows 1)" in caplog.text
    assert "leaves out 1 of 4 pairs: a response is blank (rows 2)" in caplog.text
    assert "pairs=1 are there more than once" in caplog.text
    with pytest.raises(DataError, match="no pair of two different responses"):
        loaded(tmp_path / "b.jsonl", tokenizer, rows[:2])


def test_a_long_response_of_either_kind_meets_the_limit(tmp_path, tokenizer):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "cccc"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    with pytest.raises(DataError, match="max_response_tokens=3") as caught:
        loaded(tmp_path / "a.jsonl", tokenizer, rows, max_response_tokens=3)
    assert "data.max_response_tokens=5" in caught.value.remedy
    assert len(loaded(tmp_path / "a.jsonl", tokenizer, rows, max_response_tokens=3, drop_long_prompts=True)) == 1


def test_a_text_prompt_may_be_the_users_turn(tmp_path, chat_tokenizer):
    row = {"prompt": "hi", "chosen": "yo", "rejected": "no"}
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row], as_chat=True)
    assert texts(batch, chat_tokenizer, "prompt_ids", "chosen_ids") == [(CHAT, "yo]<eos>")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("a b c", "a b d", "a b"),
        ("word", "work", ""),
        ("x: 1", "x: 2", "x:"),
        ("\n\nHuman: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: c", "\n\nHuman: a\n\nAssistant:"),
    ],
)
def test_the_common_beginning_ends_before_a_word(chosen, rejected, prompt):
    assert chosen[: common_beginning(chosen, rejected)] == prompt


def test_labelled_responses_and_pairs_taken_apart(tmp_path, tokenizer):
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": 3, "label": 0}]
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows, load=load_labelled)
    assert texts(batch, tokenizer, "prompt_ids", "response_ids") == [("a", "b<eos>"), ("a", "3<eos>")]
    assert batch.row("is_chosen").tolist() == [True, False]
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f"}]
    batch = loaded(tmp_path / "b.jsonl", tokenizer, rows, load=load_labelled)
    assert [found for _, found in texts(batch, tokenizer, "prompt_ids", "response_ids")] == [
        "b<eos>", "c<eos>", "e<eos>", "f<eos>",
    ]  # fmt: skip
    assert batch.row("is_chosen").tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    ("row", "message", "remedy"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, "The label in row 2 of", "Give true"),
        ({"prompt": "a", "completion": "b", "label": "true"}, "is the text 'true'", "without quotes"),
        ({"prompt": "a", "completion": "b", "label": None}, "The label in row 2 of", "Give true"),
        ({"prompt": "a", "completion": "", "label": True}, "Row 2 of .* has no completion", "leave the row"),
        ({"prompt": "a", "completion": {"x": 1}, "label": True}, "Row 2 of .* has a completion that is a dict", "text"),
        ({"prompt": "hi", "completion": [USER], "label": True}, "Row 2 of .* has an empty completion", "Write what"),
        ({"prompt": "hi", "completion": [GOOD, USER], "label": True}, "Row 2 of .* does not end with", "be last"),
        ({"prompt": "so", "completion": [USER, GOOD], "label": True}, "begins with the turn of 'user'", "as messages"),
        ({"prompt": None, "completion": "b", "label": True}, "The prompt in row 2 of .* is missing", "Give text"),
    ],
)
def test_a_faulty_label_is_told_with_its_row(tmp_path, tokenizer, row, message, remedy):
    with pytest.raises(DataError, match=message) as caught:
        loaded(
            tmp_path / "a.jsonl",
            tokenizer,
            [{"prompt": "a", "completion": "b", "label": True}, row],
            load=load_labelled,
        )
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("hi", [GOOD]), ("hi", [USER, GOOD]), ([USER], "yo"), ([USER], [GOOD]), ([USER], [USER, GOOD])],
)
def test_labelled_conversations_are_those_of_pairs(tmp_path, chat_tokenizer, prompt, completion):
    rows = [{"prompt": prompt, "completion": completion, "label": True}, {"prompt": "a", "completion": "b", "label": 0}]
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, rows, load=load_labelled)
    assert batch.object("prompt")[0] == [USER]
    assert texts(batch, chat_tokenizer, "prompt_ids", "response_ids")[0] == (CHAT, "yo]<eos>")


def test_blank_completions_are_left_out_with_their_labels_and_counted(tmp_path, chat_tokenizer, caplog):
    silent = {"role": "assistant", "content": None}
    rows = [
        {"prompt": prompt, "completion": completion, "label": label, "topic": prompt}
        for prompt, completion, label in (
            ("a", " ", True), ("b", "x", False), ("c", "\n", True), ("d", [silent], True), ("e", "y", True),
        )
    ]  # fmt: skip
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, rows, load=load_labelled)
    assert batch.row("is_chosen").tolist() == [False, True]
    assert batch.object("prompt") == batch.object("topic") == ["b", "e"]
    assert "leaves out 3 of 5 rows: blank completions (rows 1, 3, 4)" in caplog.text
    with pytest.raises(DataError, match="blank completions alone") as caught:
        loaded(tmp_path / "b.jsonl", chat_tokenizer, [rows[0], rows[2]], load=load_labelled)
    assert "text that follows" in caught.value.remedy


@pytest.mark.parametrize("load", [load_preferences, load_labelled])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_long_row_is_named_by_its_file_and_its_number_there(tmp_path, tokenizer, load, is_apart):
    """Rows that a filter, and those that say nothing, leave out, do not shift the numbers of those behind them."""
    (tmp_path / "f.py").write_text("def fit(level): return level > 1\n")
    fine = {"prompt": "a", "chosen": "b", "rejected": "c"}
    if not is_apart and load is load_labelled:
        fine = {"prompt": "a", "completion": "b", "label": True}
    rows = [{**fine, "level": level} for level in range(8)]
    for name in ("chosen", "completion"):
        if name in fine:
            rows[3][name], rows[6][name] = " ", "b" * 9
    settings = {"filters": [f"{tmp_path}/f.py:fit"], "max_response_tokens": 5}
    with pytest.raises(DataError, match=r"the longest, row 7 of '.*long.jsonl', has 10") as caught:
        loaded(tmp_path / "long.jsonl", tokenizer, rows, load=load, **settings)
    assert "data.max_response_tokens=10" in caught.value.remedy


def test_one_reference_alone_is_refused(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "ref_chosen_logps": -1.0}
    with pytest.raises(DataError, match="a column 'ref_chosen_logps', and no 'ref_rejected_logps'") as caught:
        loaded(tmp_path / "a.jsonl", tokenizer, [row])
    assert "Add 'ref_rejected_logps', or leave 'ref_chosen_logps' out" in caught.value.remedy


def test_references_of_one_file_alone_are_told_as_they_are_written(tmp_path, tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with_reference = written(
        tmp_path / "with_reference.jsonl", [row | {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}]
    )
    plain = written(tmp_path / "plain.jsonl", [row])
    for files in ([with_reference, plain], [plain, with_reference]):
        with pytest.raises(DataError) as caught:
            load_preferences(files, Data(), tokenizer)
        assert (
            f"'{with_reference}' has the columns ref_chosen_logps, ref_rejected_logps, and '{plain}'"
            in caught.value.message
        )
        assert "add them to the one" in caught.value.remedy


def test_a_file_read_in_two_ways_says_which_is_which(tmp_path, tokenizer, caplog):
    caplog.set_level(logging.INFO, logger="hybridflow")
    file = written(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for load, reading in (
        (load_prompts, "recognised=DeepSpeed-Chat"), (load_preferences, "recognised=prompt,chosen,rejected"),
    ):  # fmt: skip
        caplog.clear()
        load([file], Data(), tokenizer)
        (line,) = [record.getMessage() for record in caplog.records]
        assert reading in line and line.endswith("read_as=prompts" if load is load_prompts else "read_as=pairs")


def test_a_file_without_labels_is_told(tmp_path, tokenizer):
    with pytest.raises(DataError, match="no labelled responses") as caught:
        loaded(tmp_path / "a.jsonl", tokenizer, [{"prompt": "a", "completion": "b"}], load=load_labelled)
    assert "prompt, completion and label" in caught.value.remedy


def test_one_label_alone_is_told(tmp_path, tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        loaded(
            tmp_path / "a.jsonl", tokenizer, [{"prompt": "a", "completion": "b", "label": 1}] * 2, load=load_labelled
        )
    assert "label=true in every row" in caplog.text


@pytest.mark.parametrize("margin", [10**400, 1e39, float("nan")])
def test_a_margin_beyond_float32_is_told(margin):
    table = Table("pairs.jsonl", "pairs", {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"], "margin": [margin]})
    with pytest.raises(DataError, match="'margin' in row 1 of 'pairs.jsonl' is no number") as caught:
        recognise_pairs(table, Data())
    assert "Give a number in every row" in caught.value.remedy
