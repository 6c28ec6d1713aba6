import logging

import pytest

from hybridflow.data.recognition import recognise_prompts
from hybridflow.data.table import Table
from hybridflow.errors import DataError

USER = [{"role": "user", "content": "hi"}]
REPLY = {"role": "assistant", "content": "hello"}


def table(**columns):
    return Table("data.jsonl", "data", columns)


@pytest.mark.parametrize(
    ("columns", "prompt", "answer"),
    [
        ({"prompt": ["1+1="], "answer": ["2"]}, "1+1=", "2"),
        ({"prompt": [USER], "solution": ["2"]}, USER, "2"),
        ({"prompt": ["only"]}, "only", None),
        ({"prompt": [USER], "reward_model": [{"style": "rule", "ground_truth": "7"}]}, USER, "7"),
        ({"prompt": [USER], "reward_spec": [{"method": "rule", "ground_truth": "8"}]}, USER, "8"),
        ({"question": ["How many?"], "answer": ["so\n#### 4"]}, "How many?", "so\n#### 4"),
        ({"problem": ["x?"], "solution": ["long"], "answer": ["3"]}, "x?", "3"),
        ({"input": ["say"], "label": ["said"]}, "say", "said"),
        ({"prompt": ["p"], "chosen": ["good"], "rejected": ["bad"]}, "p", None),
        ({"prompt": ["p"], "chosen": ["2"], "rejected": ["3"], "answer": ["2"]}, "p", "2"),
        ({"prompt": ["p"], "completion": ["c"], "label": [True]}, "p", None),
        ({"prompt": ["p"], "completion": ["c"], "label": ["7"]}, "p", "7"),
        ({"messages": [[*USER, REPLY]]}, USER, "hello"),
        ({"messages": [USER]}, USER, None),
        ({"text": ["Once upon"]}, "Once upon", None),
    ],
)
def test_layouts_of_the_ecosystem_are_known_by_their_columns(columns, prompt, answer):
    found = recognise_prompts(table(**columns))
    assert (found.prompts, found.answers) == ([prompt], [answer])


def test_one_line_says_what_was_recognised(caplog):
    caplog.set_level(logging.INFO, logger="hybridflow")
    recognise_prompts(table(question=["q"], answer=["a"], level=[1]))
    (record,) = caplog.records
    assert record.getMessage() == (
        "data=data.jsonl rows=1 recognised=GSM8K prompt=question answer=answer extra=question,level read_as=prompts"
    )


def test_every_other_column_is_kept_for_rewards_under_its_own_name():
    found = recognise_prompts(
        table(prompt=[USER], reward_model=[{"ground_truth": "7"}], data_source=["openai/gsm8k"], extra_info=[{"i": 1}])
    )
    assert found.extras == {"reward_model": [{"ground_truth": "7"}], "extra_info": [{"i": 1}]}
    assert found.data_sources == ["openai/gsm8k"]


def test_rows_without_a_source_take_the_files_name():
    assert recognise_prompts(table(prompt=["a", "b"], data_source=["x", None])).data_sources == ["x", "data"]


def test_keys_override_what_would_be_recognised():
    found = recognise_prompts(
        table(prompt=["p"], Body=["b"], meta=[{"gold": 3}]), prompt_key="Body", answer_key="meta.gold"
    )
    assert (found.prompts, found.answers) == (["b"], [3])


@pytest.mark.parametrize("keys", [{"prompt_key": "qestion"}, {"answer_key": "qestion"}])
def test_an_unknown_key_is_answered_with_the_nearest_column(keys):
    with pytest.raises(DataError, match=rf"data.{next(iter(keys))}=qestion: 'data.jsonl' has no such column") as caught:
        recognise_prompts(table(question=["q"], level=[1]), **keys)
    assert "Did you mean 'question'?" in caught.value.remedy


def test_unknown_columns_ask_for_a_key():
    with pytest.raises(DataError, match="columns are: Body, Equation") as caught:
        recognise_prompts(table(Body=["b"], Equation=["e"]))
    assert "data.prompt_key=" in caught.value.remedy


def test_columns_with_names_of_the_system_are_left_out_with_a_warning(caplog):
    found = recognise_prompts(table(prompt=["p"], answer=["a"], values=[1], rewards=[2], level=[3]))
    assert found.extras == {"level": [3]}
    assert "columns=values,rewards" in caplog.text


def test_an_answer_column_hidden_by_another_key_is_warned_about(caplog):
    recognise_prompts(table(prompt=["p"], answer=["a"], gold=["g"]), answer_key="gold")
    assert "columns=answer" in caplog.text
