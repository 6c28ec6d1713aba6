import json

import pyarrow.csv
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import Data, Truncation
from hybridflow.data import load_demonstrations
from hybridflow.errors import DataError
from tests.unit.data.conftest import texts, written

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
CHAT = "[user:hi]<eos>[assistant:"
DIALOGUE = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: so?\n\nAssistant:"


def loaded(path, tokenizer, rows, **settings):
    return load_demonstrations([written(path, rows)], Data(**settings), tokenizer)


def parts(batch, tokenizer):
    return [
        *zip(*(texts(tokenizer, batch.tokens(name).rows()) for name in ("prompt_ids", "response_ids")), strict=True)
    ]


@pytest.mark.parametrize(
    ("row", "prompt", "response"),
    [
        ({"prompt": "1+1=", "completion": "2"}, "<bos>1+1=", "2<eos>"),
        ({"prompt": "1+1=", "answer": 2}, "<bos>1+1=", "2<eos>"),
        ({"question": "How?", "answer": " So."}, "<bos>How?", " So.<eos>"),
        ({"input": "1+1=", "output": "2"}, "<bos>1+1=", "2<eos>"),
        ({"instruction": "Add", "input": "1 1", "output": "2"}, "<bos>Add\n\n1 1", "2<eos>"),
        ({"instruction": "Wait", "input": "", "output": "2"}, "<bos>Wait", "2<eos>"),
        ({"instruction": "double it", "input": 0, "output": 0}, "<bos>double it\n\n0", "0<eos>"),
        ({"instruction": "Add", "input": "", "context": "1 1", "response": "2"}, "<bos>Add\n\n1 1", "2<eos>"),
        ({"instruction": "Briefly.", "question": "1+1?", "output": "2"}, "<bos>Briefly.\n\n1+1?", "2<eos>"),
        ({"instruction": "Add", "context": "1 1", "answer": "2"}, "<bos>Add\n\n1 1", "2<eos>"),
        ({"problem": "1+1=", "solution": "1+1 is 2.", "answer": "2"}, "<bos>1+1=", "1+1 is 2.<eos>"),
        ({"prompt": "1+1=", "completion": "1+1= 2"}, "<bos>1+1=", " 2<eos>"),
        ({"prompt": "The cat", "completion": "The cats"}, "<bos>The cat", "The cats<eos>"),
        ({"text": "Once", "data": ["a tag", "another"]}, "<bos>", "Once<eos>"),
        ({"question": "How?", "answer": "So.", "data": ["a tag", "another"]}, "<bos>How?", "So.<eos>"),
        ({"messages": json.dumps([USER, REPLY])}, CHAT, "yo]<eos>"),
        ({"messages": str([USER, REPLY])}, CHAT, "yo]<eos>"),
        (
            {"conversations": json.dumps([{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}])},
            CHAT,
            "yo]<eos>",
        ),
        ({"messages": [USER, REPLY], "system": "Be brief"}, "[system:Be brief]<eos>" + CHAT, "yo]<eos>"),
        (
            {"prompt": [USER], "completion": [USER, REPLY], "system_prompt": "Be brief"},
            "[system:Be brief]<eos>" + CHAT,
            "yo]<eos>",
        ),
        ({"prompt": "p", "chosen": " good", "rejected": " bad"}, "<bos>p", " good<eos>"),
        ({"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b"}, "<bos>" + DIALOGUE, " a<eos>"),
        ({"chosen": [USER, REPLY], "rejected": [USER]}, CHAT, "yo]<eos>"),
        ({"messages": [USER, REPLY]}, CHAT, "yo]<eos>"),
        ({"prompt": [USER], "completion": [REPLY]}, CHAT, "yo]<eos>"),
        ({"prompt": [USER], "completion": "yo"}, CHAT, "yo]<eos>"),
        ({"text": "Once"}, "<bos>", "Once<eos>"),
    ],
)
def test_formats_become_prompt_and_response(tmp_path, chat_tokenizer, row, prompt, response):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row])
    assert parts(batch, chat_tokenizer) == [(prompt, response)]
    mask = batch.tokens("response_mask")
    assert mask.values.dtype == torch.float32 and mask.values.tolist() == [1.0] * len(
        batch.tokens("response_ids").row(0)
    )


def test_text_without_a_beginning_token_learns_all_but_its_first_token(tmp_path, tokenizer):
    assert parts(loaded(tmp_path / "a.jsonl", tokenizer, [{"text": "Once"}]), tokenizer) == [("O", "nce<eos>")]


def test_a_token_that_would_straddle_the_cut_is_avoided(tmp_path):
    merges = PreTrainedTokenizerFast(tokenizer_object=_pairs(), eos_token="<eos>", unk_token="<unk>")
    batch = loaded(tmp_path / "a.jsonl", merges, [{"prompt": "a", "completion": "bc"}])
    assert parts(batch, merges) == [("a", "bc<eos>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": ""},
        {"prompt": "a", "completion": None},
        {"prompt": "a", "completion": True},
        {"prompt": "a", "completion": {"text": "b"}},
        {"prompt": "a", "completion": [{"text": "b"}]},
        {"messages": [USER]},
        {"messages": [REPLY]},
        {"messages": [USER, REPLY, USER]},
        {"messages": [USER, {"role": "assistant", "content": " "}, USER, REPLY]},
    ],
)
def test_a_row_without_anything_to_learn_is_named(tmp_path, chat_tokenizer, row):
    with pytest.raises(DataError, match=r"Row 1 of '.*a.jsonl' does not end with a completion"):
        loaded(tmp_path / "a.jsonl", chat_tokenizer, [row])


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
ANSWER = {"role": "tool", "content": "2"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"messages": [USER, REPLY]}], "completion=every assistant turn duplicates"),
        ([{"messages": [USER, CALL, ANSWER, REPLY]}], "completion=every assistant turn, and no tool turn"),
        ([{"text": "abc"}], "completion=the whole text"),
        ([{"chosen": "\n\nHuman: a\n\nAssistant: b"}], "completion=the last reply"),
    ],
)
def test_the_log_says_which_part_of_conversations_and_texts_is_learned(tmp_path, chat_tokenizer, caplog, rows, said):
    caplog.set_level("INFO", logger="hybridflow")
    loaded(tmp_path / "a.jsonl", chat_tokenizer, rows)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("weights", "said"),
    [([{}, {"weight": 0}], ["[user:hi]<eos>[assistant:", "yo]<eos>"]),
     ([{"weight": 0}, {"weight": 1}], ["[user:hi]<eos>[assistant:yo]<eos>[user:hi]<eos>[assistant:", "yo]<eos>"]),
     ([{"train": False}, {}], ["[user:hi]<eos>[assistant:yo]<eos>[user:hi]<eos>[assistant:", "yo]<eos>"])],
)  # fmt: skip
@pytest.mark.parametrize("is_sharegpt", [False, True])
def test_turns_without_a_weight_are_not_learned(tmp_path, chat_tokenizer, caplog, weights, said, is_sharegpt):
    turns = [turn for more in weights for turn in (USER, REPLY | more)]
    row = {"messages": turns}
    if is_sharegpt:
        names = {"role": "from", "content": "value"}
        row = {"conversations": [{names.get(name, name): value for name, value in turn.items()} for turn in turns]}
    none = {"messages": [USER, REPLY | {"weight": 0}]}
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [row] if is_sharegpt else [row, none])
    assert parts(batch, chat_tokenizer) == [tuple(said)]
    assert is_sharegpt or "leaves out 1 of 2 rows: no assistant turn has a weight (rows 2)" in caplog.text


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}),
        ({"prompt": "a", "output": "b", "kto_tag": 1}, {"prompt": "a", "output": "c", "kto_tag": 0}),
        ({"messages": [USER, REPLY], "label": True}, {"messages": [USER, REPLY], "label": False}),
    ],
)
def test_responses_that_are_labeled_as_bad_are_left_out(tmp_path, chat_tokenizer, caplog, good, bad):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [good, bad])
    assert parts(batch, chat_tokenizer) == parts(loaded(tmp_path / "b.jsonl", chat_tokenizer, [good]), chat_tokenizer)
    assert "leaves out 1 of 2 rows: the label says that the response is bad (rows 2)" in caplog.text
    cells = [{name: value if isinstance(value, str) else json.dumps(value) for name, value in row.items()}
             for row in (good, bad)]  # fmt: skip
    pyarrow.csv.write_csv(pyarrow.Table.from_pylist(cells), tmp_path / "d.csv")
    table = load_demonstrations([str(tmp_path / "d.csv")], Data(), chat_tokenizer)
    assert parts(table, chat_tokenizer) == parts(batch, chat_tokenizer)
    with pytest.raises(DataError, match=r"no usable rows: the label says that the response is bad \(1\)"):
        loaded(tmp_path / "c.jsonl", chat_tokenizer, [bad])


def test_keys_name_the_columns_that_are_not_known(tmp_path, tokenizer):
    rows = [{"body": "x", "reply": "y"}]
    with pytest.raises(DataError, match=r"it has: body, reply.*data\.prompt_key"):
        loaded(tmp_path / "a.jsonl", tokenizer, rows)
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows, prompt_key="body", answer_key="reply")
    assert parts(batch, tokenizer) == [("x", "y<eos>")]


def test_rows_over_either_limit_are_left_out_if_asked(tmp_path, tokenizer):
    rows = [{"prompt": "a" * p, "completion": "b" * r} for p, r in ((9, 1), (1, 9), (2, 2))]
    limits = {"max_prompt_tokens": 5, "max_response_tokens": 5, "truncation": Truncation.drop}
    assert parts(loaded(tmp_path / "a.jsonl", tokenizer, rows, **limits), tokenizer) == [("aa", "bb<eos>")]


@pytest.mark.parametrize(("side", "prompt"), [(Truncation.left, "cde"), (Truncation.right, "abc")])
def test_long_demonstrations_keep_the_start_of_what_is_learned(tmp_path, tokenizer, side, prompt):
    """A completion that was cut has no end-of-sequence; a prompt of any length does not hide its completion."""
    rows = [{"prompt": p, "completion": c} for p, c in (("abcde", "xyzxyz"), ("ab" * 500 + prompt, "xyz"), ("a", "x"))]
    limits = {"max_prompt_tokens": 3, "max_response_tokens": 4, "truncation": side}
    batch = loaded(tmp_path / "a.jsonl", tokenizer, rows, **limits)
    first = {"left": prompt, "right": "aba"}[side.name]
    assert parts(batch, tokenizer) == [(prompt, "xyzx"), (first, "xyz<eos>"), ("a", "x<eos>")]
    assert batch.tokens("response_mask").lengths.tolist() == batch.tokens("response_ids").lengths.tolist()


def test_a_tokenizer_that_cannot_end_is_an_error(tmp_path):
    endless = PreTrainedTokenizerFast(tokenizer_object=_pairs(), unk_token="<unk>")
    with pytest.raises(DataError, match=r"no end-of-sequence.*model\.tokenizer_path"):
        loaded(tmp_path / "a.jsonl", endless, [{"prompt": "a", "completion": "b"}])


def _pairs():
    """A tokenizer that takes two characters at a time: 'a' + 'bc' is other tokens than 'abc'."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", "a", "b", "c", "ab", "bc"])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("..|."), "isolated")
    return inner


def test_texts_that_are_learned_whole_stay_texts(tmp_path, chat_tokenizer):
    batch = loaded(tmp_path / "a.jsonl", chat_tokenizer, [{"text": "Once"}], as_chat=True)
    assert parts(batch, chat_tokenizer) == [("<bos>", "Once<eos>")]
