import json
import logging

import pytest
import torch

from hybridflow.config.data import Data, Truncation
from hybridflow.data import load_prompts
from hybridflow.data.prompts import recognize_prompts
from hybridflow.data.selection import prepared
from hybridflow.data.sources import Table
from hybridflow.errors import DataError
from hybridflow.rewards.factory import row_checks
from tests.unit.data.conftest import texts, written

USER, REPLY = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "hello"}
DIALOGUE = "\n\nHuman: hi\n\nAssistant: yo\n\nHuman: so?\n\nAssistant:"


def table(**columns):
    return Table("data.jsonl", "data", columns)


@pytest.mark.parametrize(
    ("columns", "format", "prompt", "answer"),
    [
        ({"prompt": ["1+1="], "answer": ["2"]}, "trl_prompt", "1+1=", "2"),
        ({"prompt": [USER], "solution": ["2"]}, "trl_prompt", USER, "2"),
        ({"prompt": ["only"]}, "trl_prompt", "only", None),
        ({"prompt": [USER], "reward_model": [{"style": "rule", "ground_truth": "7"}]}, "verl", USER, "7"),
        ({"prompt": [USER], "reward_spec": [{"method": "rule", "ground_truth": "8"}]}, "SkyRL", USER, "8"),
        ({"question": ["How many?"], "answer": ["so\n#### 4"]}, "GSM8K", "How many?", "so\n#### 4"),
        ({"problem": ["x?"], "solution": ["long"], "answer": ["3"]}, "MATH", "x?", "3"),
        ({"input": ["say"], "label": ["said"]}, "OpenRLHF", "say", "said"),
        ({"prompt": ["p"], "chosen": ["good"], "rejected": ["bad"]}, "DeepSpeed-Chat", "p", None),
        ({"prompt": ["p"], "chosen": ["2"], "rejected": ["3"], "answer": ["2"]}, "DeepSpeed-Chat", "p", "2"),
        ({"prompt": ["p"], "completion": ["c"], "label": [True]}, "trl_prompt", "p", None),
        ({"prompt": ["p"], "completion": ["c"], "label": ["7"]}, "trl_prompt", "p", "7"),
        ({"messages": [[*USER, REPLY]]}, "messages", USER, "hello"),
        ({"messages": [USER]}, "messages", USER, None),
        ({"text": ["Once upon"]}, "text", "Once upon", None),
        ({"chosen": [DIALOGUE + " a"], "rejected": [DIALOGUE + " b"]}, "HH", DIALOGUE, None),
    ],
)
def test_formats_of_other_systems_are_known_by_their_columns(caplog, columns, format, prompt, answer):
    caplog.set_level(logging.INFO, logger="hybridflow")
    found = recognize_prompts(table(**columns))
    assert (found["prompt"], found["answer"], found["data_source"]) == ([prompt], [answer], ["data"])
    assert f"data=data.jsonl rows=1 format={format} prompt=" in caplog.text


MMLU = {"question": "2+2?", "choices": ["1", "4"], "answer": 1}
PIRATE = {"question": "hi", "system_prompt": "Be a pirate", "history": [["a", "b"]]}
ARC = {"question": "Which is red?", "choices": {"text": ["sky", "sun"], "label": ["A", "B"]}}


@pytest.mark.parametrize(
    ("row", "settings", "unused", "way"),
    [
        (MMLU, {}, "choices", "set data.map=FILE:FUNCTION"),
        (MMLU | {"question": "2+2? A. 1 B. 4"}, {}, None, ""),
        (ARC, {}, "choices", "data.map"),
        ({"question": "is it?", "passage": "It  is.", "answer": True}, {}, "passage",
         "data.prompt_template='... {passage} ...'"),
        ({"question": "It is. Is it?", "passage": "It  is."}, {}, None, ""),
        ({"question": "is it?", "passage": "It is."}, {"prompt_template": "{passage}"}, None, ""),
        ({"prompt": USER, "tools": "[]"}, {}, None, ""),
        ({"prompt": USER, "tools": [{"name": "add"}], "passage": "It is."}, {}, "tools,passage", "data.map"),
        ({"prompt": USER, "tools": "add"}, {}, "tools", "to use them, set data.map=FILE:FUNCTION"),
        (PIRATE, {}, "system_prompt,history", "data.as_chat=true (for system messages and history)"),
        (PIRATE, {"as_chat": True}, None, ""),
        (PIRATE | {"history": "ab"}, {"as_chat": True}, "history", "data.map"),
        ({"prompt": "sum 1 2", "instruction": "sum", "input": "1 2"}, {}, None, ""),
    ],
)  # fmt: skip
def test_columns_that_look_like_parts_of_a_prompt_and_are_not_used_are_told(
    chat_tokenizer, caplog, row, settings, unused, way
):
    source = table(**{name: [cell] for name, cell in row.items()})
    load_prompts([prepared(source, config := Data(**settings))], config, chat_tokenizer)
    found = [message for message in caplog.messages if "look like parts of the prompt" in message]
    assert len(found) == (unused is not None)
    assert not found or (f"columns={unused} look" in found[0] and way in found[0])


def test_system_messages_and_history_in_columns_of_their_own_come_before_a_conversation(tokenizer, chat_tokenizer):
    columns = {"system": ["Be brief", None, "Be brief"], "history": [[["a", "b"]], None, [["a", "b"]]]}
    system, own = {"role": "system", "content": "Be brief"}, {"role": "system", "content": "Own"}
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    prompts = [USER, USER, [own, *USER, REPLY, *USER]]
    batch = load_prompts([table(prompt=prompts, **columns)], Data(), chat_tokenizer)
    assert batch.object("prompt") == [[system, *before, *USER], USER, prompts[2]]
    batch = load_prompts([table(prompt=["hi"] * 3, **columns)], Data(as_chat=True), chat_tokenizer)
    assert batch.object("prompt") == [[system, *before, *USER], USER, [system, *before, *USER]]


def test_messages_and_objects_that_are_written_as_json_text_are_parsed(caplog):
    caplog.set_level(logging.INFO, logger="hybridflow")
    source = table(prompt=[json.dumps(USER), "[1] and {"], reward_model=[json.dumps({"ground_truth": "7"})] * 2)
    found = recognize_prompts(prepared(source, Data()))
    assert (found["prompt"], found["answer"]) == ([USER, "[1] and {"], ["7", "7"])
    assert "columns=prompt,reward_model hold JSON as text, which is parsed" in caplog.text
    found = recognize_prompts(prepared(table(q=["a"], meta=['{"gold": 3}']), config := Data(answer_key="meta.gold")),
                              prompt_key="q", answer_key=config.answer_key)  # fmt: skip
    assert found["answer"] == [3]
    broken = table(prompt=["p", "[{'content': 'hi', 'role': 'user'}\n {'content': 'yo', 'role': 'assistant'}]"])
    with pytest.raises(DataError, match=r"Row 2 of 'data.jsonl' .*column 'prompt'.*cannot be parsed.*json\.dumps"):
        prepared(broken, Data())
    assert prepared(broken, Data(prompt_template="{prompt}")).columns["prompt"] == broken.columns["prompt"]


@pytest.mark.parametrize("key", [None, "text"])
def test_a_column_of_texts_is_said_to_be_prompts_unless_the_user_named_it(caplog, key):
    caplog.set_level(logging.INFO, logger="hybridflow")
    assert recognize_prompts(table(text=["Once"]), prompt_key=key)["prompt"] == ["Once"]
    note = "read_as=prompts (a response to each text is generated; hybridflow sft learns the texts)"
    assert (note in caplog.text) == (key is None)


def test_every_other_column_is_kept_under_its_own_name(caplog):
    caplog.set_level(logging.INFO, logger="hybridflow")
    found = recognize_prompts(
        table(
            prompt=["a", "b"], reward_model=[{"ground_truth": "7"}] * 2, data_source=["x", None], i=[1, 2],
            values=[3, 4],
        )
    )  # fmt: skip
    assert {name: found[name] for name in (*found,)[2:]} == {
        "data_source": ["x", "data"], "reward_model": [{"ground_truth": "7"}] * 2, "i": [1, 2],
    }  # fmt: skip
    assert "columns=values do not reach the reward functions" in caplog.text
    assert (
        "prompt=prompt answer=reward_model.ground_truth other_columns=reward_model,i duplicates=0 read_as=prompts"
        in caplog.text
    )


def test_keys_override_the_format(caplog):
    columns = table(prompt=["p"], Body=["b"], meta=[{"gold": 3}], answer=["a"])
    found = recognize_prompts(columns, prompt_key="Body", answer_key="meta.gold")
    assert (found["prompt"], found["answer"]) == (["b"], [3])
    assert "columns=prompt,answer" in caplog.text


@pytest.mark.parametrize("keys", [{"prompt_key": "qestion"}, {"answer_key": "qestion"}])
def test_an_unknown_key_is_answered_with_the_nearest_column(keys):
    with pytest.raises(DataError, match=rf"data.{next(iter(keys))}: 'data.jsonl' has no .* 'qestion'.*'question'\?"):
        recognize_prompts(table(question=["q"], level=[1]), **keys)
    with pytest.raises(DataError, match=r"columns are: Body, Equation.*data\.prompt_key="):
        recognize_prompts(table(Body=["b"], Equation=["e"]))


def test_files_follow_each_other_and_missing_columns_are_none(tmp_path, tokenizer):
    first = written(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1", "level": 3}])
    second = written(tmp_path / "b.jsonl", [{"question": "yy", "answer": "2"}])
    batch = load_prompts([first, second], Data(), tokenizer)
    assert batch.objects == {
        "prompt": ["x", "yy"], "answer": ["1", "2"], "data_source": ["a", "b"], "level": [3, None],
        "question": [None, "yy"],
    }  # fmt: skip
    prompts = batch.tokens("prompt_ids")
    assert prompts.values.dtype == torch.int64 and texts(tokenizer, prompts.rows()) == ["x", "yy"]


def test_no_files_are_an_error(tokenizer):
    with pytest.raises(DataError, match=r"No data files.*data\.train_files"):
        load_prompts([], Data(), tokenizer)


def test_long_prompts_are_counted_and_refused_or_left_out_if_asked(tmp_path, tokenizer, caplog):
    rows = [{"prompt": "x" * n, "answer": n, "level": -n} for n in (3, 9, 4, 12)]
    path = written(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load_prompts([path], Data(max_prompt_tokens=8), tokenizer)
    assert str(caught.value).startswith(
        f"2 of 4 prompts are longer than data.max_prompt_tokens=8 tokens (the longest, row 4 of '{path}', has 12). Set"
        " data.max_prompt_tokens=12 if the model can read that many, or data.truncation=drop"
    )
    batch = load_prompts([path], Data(max_prompt_tokens=8, truncation=Truncation.drop), tokenizer)
    assert (batch.object("answer"), batch.object("level")) == ([3, 4], [-3, -4])
    assert batch.tokens("prompt_ids").lengths.tolist() == [3, 4]
    assert "data.truncation=drop leaves out 2 of 4 prompts" in caplog.text
    assert "2 of 4 prompts kept (50%)" in caplog.text


@pytest.mark.parametrize(("side", "kept"), [(Truncation.left, "end"), (Truncation.right, "beg")])
def test_long_prompts_keep_their_end_or_their_beginning_and_are_counted(tmp_path, tokenizer, caplog, side, kept):
    """Also those of which only the beginning would be read to know that they are too long."""
    ends = [f"beg{'-' * length}end" for length in (9, 900)]
    path = written(tmp_path / "a.jsonl", [{"prompt": text} for text in ("abc", *ends)])
    batch = load_prompts([path], Data(max_prompt_tokens=3, truncation=side), tokenizer)
    texts = [tokenizer.decode(row).replace(" ", "") for row in batch.tokens("prompt_ids").rows()]
    assert texts == ["abc", kept, kept] and batch.object("prompt")[2] == ends[1]
    assert f"data.truncation={side.name} cuts 2 of 3 prompts longer than data.max_prompt_tokens=3" in caplog.text


@pytest.mark.parametrize("short", [0, 4])
def test_next_to_nothing_left_after_dropping_is_an_error(tmp_path, tokenizer, short):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x"}] * short + [{"prompt": "xxx"}] * 96)
    with pytest.raises(
        DataError, match=rf"{short} of {96 + short} prompts \({short}%\) can be used.*Raise data\.max_prompt"
    ):
        load_prompts([path], Data(max_prompt_tokens=2, truncation=Truncation.drop), tokenizer)
    allowed = Data(max_prompt_tokens=2, truncation=Truncation.drop, min_kept_fraction=0.04)
    if short:
        assert len(load_prompts([path], allowed, tokenizer)) == short


def test_rows_without_an_answer_are_an_error_if_the_reward_needs_one(tmp_path, tokenizer):
    path = written(tmp_path / "a.jsonl", [{"prompt": "x", "answer": "1"}, {"prompt": "y"}, {"prompt": "z"}])
    with pytest.raises(DataError, match=r"2 of 3 rows have no answer.*\[gsm8k\].* is row 2 of.*data\.answer_key"):
        load_prompts([path], Data(), tokenizer, answer_functions=["gsm8k"])
    assert len(load_prompts([path], Data(), tokenizer)) == 3


@pytest.mark.parametrize(
    ("tests", "said"), [(["pass"], "Every program passes the tests"), ("[" * 100_000, "cannot parse the tests")]
)
def test_a_row_that_code_tests_cannot_judge_is_found_before_training(tmp_path, tokenizer, tests, said):
    rows = [{"prompt": "p", "tests": each} for each in (["assert f(1) == 2"], None, tests)]
    path = written(tmp_path / "problems.jsonl", rows)
    with pytest.raises(DataError, match=rf"row 3 of '.*problems.jsonl': .*{said}.*a list of assert statements"):
        load_prompts([path], Data(), tokenizer, row_checks=row_checks(["gsm8k", "code_tests", "own.py:f"]))
    assert len(load_prompts([path], Data(), tokenizer, row_checks=row_checks(["gsm8k"]))) == 3
