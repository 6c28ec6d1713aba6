import json

import pytest

from hybridflow.config.data import Data, Truncation
from hybridflow.data import load_labeled, load_preferences
from hybridflow.errors import DataError
from tests.unit.data.conftest import texts, written

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yo"), ("assistant", "no")))
TURNS = [USER, GOOD, {"role": "user", "content": "so"}]
HH = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: so\n\nAssistant:"
CHAT = "[user:hi]<eos>[assistant:"
LONG_CHAT = "[user:hi]<eos>[assistant:yo]<eos>[user:so]<eos>[assistant:"
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def loaded(path, tokenizer, rows, *, load=load_preferences, **settings):
    return load([written(path, rows)], Data(**settings), tokenizer)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "<bos>1+1=", "2<eos>", "3<eos>"),
        ({"prompt": "1+1=", "chosen": 2, "rejected": 3}, "<bos>1+1=", "2<eos>", "3<eos>"),
        ({"question": "How?", "chosen": " So.", "rejected": " No."}, "<bos>How?", " So.<eos>", " No.<eos>"),
        ({"prompt": HH, "chosen": " yes", "rejected": " no"}, f"<bos>{HH}", " yes<eos>", " no<eos>"),
        ({"prompt": HH, "chosen": HH + " yes", "rejected": HH + " no"}, f"<bos>{HH}", " yes<eos>", " no<eos>"),
        ({"prompt": "1+", "chosen": "1+ 2", "rejected": "3"}, "<bos>1+", "1+ 2<eos>", "3<eos>"),
        (
            {"instruction": "Add", "context": "1 1", "chosen": "2", "rejected": "3"},
            "<bos>Add\n\n1 1",
            "2<eos>",
            "3<eos>",
        ),
        (
            {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
            CHAT,
            "yo]<eos>",
            "no]<eos>",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD], "system": "s"},
            "[system:s]<eos>" + CHAT,
            "yo]<eos>",
            "no]<eos>",
        ),
        (
            {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], "system": "s"},
            "[system:s]<eos>" + CHAT,
            "yo]<eos>",
            "no]<eos>",
        ),
        ({"chosen": HH + " yes", "rejected": HH + " you"}, f"<bos>{HH}", " yes<eos>", " you<eos>"),
        ({"chosen": "It is blue.", "rejected": "It is bleak."}, "<bos>It is", " blue.<eos>", " bleak.<eos>"),
        ({"chosen": "1+1=12", "rejected": "1+1=13"}, "<bos>1+1=", "12<eos>", "13<eos>"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": [USER], "chosen": "yo", "rejected": "no"}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": "hi", "chosen": [GOOD], "rejected": [BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, CHAT, "yo]<eos>", "no]<eos>"),
        ({"chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}, LONG_CHAT, "yo]<eos>", "no]<eos>"),
    ],
)
def test_formats_become_a_prompt_and_two_responses(tmp_path, chat_tokenizer, row, prompt, chosen, rejected):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row])
    found = [texts(chat_tokenizer, batch.tokens(f"{name}_ids").rows()) for name in ("prompt", "chosen", "rejected")]
    assert found == [[prompt], [chosen], [rejected]]
    assert batch.row("margin").tolist() == [0.0] and "ref_sums" not in batch


def test_the_other_columns_of_a_pair_are_kept(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="hybridflow")
    row = PAIR | {"answer": "b", "topic": "x"}
    rows = [
        row | {"margin": 1.5, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0},
        row | {"margin": None, "ref_chosen_logps": -3, "ref_rejected_logps": -4.5},
    ]
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows)
    assert batch.row("margin").tolist() == [1.5, 0.0]
    assert batch.row("ref_sums").tolist() == [[-1.0, -2.0], [-3.0, -4.5]]
    assert batch.objects == {"prompt": ["a"] * 2, "answer": ["b"] * 2, "data_source": ["a"] * 2, "topic": ["x"] * 2}
    found = "format=prompt,chosen,rejected prompt=prompt chosen=chosen rejected=rejected"
    assert f"{found} other_columns=topic duplicates=1 read_as=pairs" in caplog.text


@pytest.mark.parametrize(
    ("row", "message", "remedy"),
    [
        ({"prompt": "a", "chosen": None, "rejected": "b"}, "a chosen response that is missing", "leave the row out"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "a rejected response that is empty", "leave the row out"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "a prompt that is empty", "Give text"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "one response as text and one as messages", "same way"),
        ({"prompt": "a", "chosen": {"x": 1}, "rejected": "b"}, "a chosen response that is of type dict", "Give text"),
        ({"chosen": "yes", "rejected": "no"}, "no common beginning", "prompt column"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "an empty rejected response", "leave the row out"),
        ({"prompt": [USER], "chosen": [GOOD, USER], "rejected": [BAD]}, "does not end with the assistant", "End it"),
    ],
)
def test_a_faulty_pair_is_named_with_its_row(tmp_path, chat_tokenizer, row, message, remedy):
    fine = {"chosen": "x 1", "rejected": "x 2"} | ({"prompt": "p"} if "prompt" in row else {})
    with pytest.raises(DataError, match=f"^Row 2 of '.*{message}.*{remedy}"):
        loaded(tmp_path / "pairs.jsonl", chat_tokenizer, [fine, row])


@pytest.mark.parametrize(
    ("row", "message", "remedy"),
    [
        *(
            (PAIR | {"margin": value}, "'margin' in row 1 of .* must be a number", "leave the column")
            for value in ("much", True, float("nan"), 10**400, 1e39)
        ),
        ({"prompt": "a", "chosen": "b"}, "no column 'rejected'", "prompt, chosen and rejected"),
        (
            PAIR | {"ref_chosen_logps": -1.0},
            "a column 'ref_chosen_logps' but no 'ref_rejected_logps'",
            "Add 'ref_rejected_logps', or leave 'ref_chosen_logps' out",
        ),
    ],
)
def test_faulty_columns_are_named(tmp_path, tokenizer, row, message, remedy):
    with pytest.raises(DataError, match=f"{message}.*{remedy}"):
        loaded(tmp_path / "a.jsonl", tokenizer, [row])


def test_ties_and_blank_pairs_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    caplog.set_level("INFO", logger="hybridflow")
    rows = [PAIR | {"rejected": "b", "margin": "x"}, PAIR | {"chosen": " \n"}, PAIR | {"margin": 2}, PAIR]
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows)
    assert batch.row("margin").tolist() == [2.0, 0.0]
    assert "leaves out 1 of 4 pairs: both responses are the same (rows 1)" in caplog.text
    assert "leaves out 1 of 4 pairs: a response is blank (rows 2)" in caplog.text
    assert "duplicates=1 read_as=pairs" in caplog.text
    reasons = r"both responses are the same \(1\), a response is blank \(1\)"
    with pytest.raises(DataError, match=f"no usable pairs: {reasons}"):
        loaded(tmp_path / "b.jsonl", tokenizer, rows[:2])


@pytest.mark.parametrize("load", [load_preferences, load_labeled])
@pytest.mark.parametrize("is_pair", [True, False])
def test_a_long_row_is_named_by_its_number_in_the_file(tmp_path, tokenizer, load, is_pair):
    """Rows that a filter leaves out, and blank ones, do not shift the numbers of the rows after them."""
    (tmp_path / "f.py").write_text("def fit(level): return level > 1\n")
    labeled = not is_pair and load is load_labeled
    fine = {"prompt": "a", "completion": "b", "label": True} if labeled else PAIR
    rows = [{**fine, "level": level} for level in range(8)]
    name = "completion" if labeled else "chosen"
    rows[3][name], rows[6][name] = " ", "b" * 9
    settings = {"filters": [f"{tmp_path}/f.py:fit"], "max_response_tokens": 5}
    with pytest.raises(DataError, match=r"the longest, row 7 of '.*long.jsonl', has 10.*data\.max_response_tokens=10"):
        loaded(tmp_path / "long.jsonl", tokenizer, rows, load=load, **settings)
    assert len(loaded(tmp_path / "long.jsonl", tokenizer, rows, load=load, truncation=Truncation.drop, **settings)) > 0


def test_pairs_that_are_cut_to_equal_responses_are_left_out_and_counted(tmp_path, tokenizer, caplog):
    rows = [{"prompt": "abcab", "chosen": "bbbc", "rejected": "bbba"}, {"prompt": "a", "chosen": "bc", "rejected": "a"}]
    settings = {"max_prompt_tokens": 2, "max_response_tokens": 3, "truncation": Truncation.left}
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows, **settings)
    assert [tokenizer.decode(row).replace(" ", "") for row in batch.tokens("chosen_ids").rows()] == ["bc<eos>"]
    assert "leaves out 1 of 2 pairs, whose responses are equal in their first 3 tokens" in caplog.text


def test_references_of_one_file_alone_are_named_as_in_the_file(tmp_path, tokenizer):
    both = written(tmp_path / "both.jsonl", [PAIR | {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}])
    none = written(tmp_path / "none.jsonl", [PAIR])
    for files in ([both, none], [none, both]):
        with pytest.raises(DataError) as caught:
            load_preferences(files, Data(), tokenizer)
        assert f"'{both}' has the columns ref_chosen_logps, ref_rejected_logps, but '{none}'" in caught.value.message
        assert "add the missing ones" in caught.value.remedy
