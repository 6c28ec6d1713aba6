"""Tool calls in the text of replies, typed functions as tools, and what the model is told about mistakes."""

import asyncio
import json
from collections.abc import Callable
from functools import partial

import hypothesis
import pytest
from hypothesis import strategies

from hybridflow.environments.built_in.calculator import calculate
from hybridflow.environments.tool_calls import hermes_calls, llama_calls, mistral_calls, parser_of
from hybridflow.environments.tools import Toolbox, tool_schema
from hybridflow.errors import ConfigError
from tests.unit.environments.families import FAMILIES, tokenizer_of

CALL = {"name": "add", "arguments": {"first": 12, "second": 12}}
FORMS = {
    hermes_calls: '<tool_call>\n{"name": "add", "arguments": {"first": 12, "second": 12}}\n</tool_call>',
    llama_calls: '{"name": "add", "parameters": {"first": 12, "second": 12}}',
    mistral_calls: '[TOOL_CALLS] [{"name": "add", "arguments": {"first": 12, "second": 12}}]',
}


def add(first: int, second: int = 0, label: str = "") -> str:
    """Adds two integers.

    Args:
        first: The first integer.
        second: The second integer.
        label: A name.
    """
    if second == 13:
        raise ValueError("not thirteen")
    return f"{label}{first + second}"


@pytest.mark.parametrize("parser", FORMS)
def test_each_form_of_a_call_is_found(parser):
    assert parser(FORMS[parser]) == [CALL]
    assert parser("Twelve and twelve make 24.") == []


def test_several_calls_and_calls_within_text_are_found():
    one = FORMS[hermes_calls]
    assert hermes_calls(f"<think>\nI add.\n</think>\n{one}\n{one}") == [CALL, CALL]
    assert mistral_calls(f"I add.[TOOL_CALLS] [{json.dumps(CALL)}, {json.dumps(CALL)}]") == [CALL, CALL]
    assert llama_calls(f"<|python_tag|>{FORMS[llama_calls]}; {FORMS[llama_calls]}") == [CALL, CALL]


@pytest.mark.parametrize(
    ("parser", "text", "error"),
    [
        (hermes_calls, "<tool_call>add 12 12</tool_call>", "call is not valid JSON (Expecting value: line 1 column 1"),
        (hermes_calls, '<tool_call>{"name": "add", "arguments": {"first": 1', "call is not valid JSON"),
        (hermes_calls, '<tool_call>{"name": 5}</tool_call>', "call does not name a tool"),
        (hermes_calls, "<tool_call>[1]</tool_call>", "call does not name a tool"),
        (hermes_calls, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are not a JSON object"),
        (hermes_calls, '<tool_call>{"name": "add"} now</tool_call>', "but continues with 'now</tool_call>'"),
        (llama_calls, '{"name": "add", ', "call is not valid JSON"),
        (llama_calls, '<|python_tag|>print("x")', "call is not valid JSON"),
        (mistral_calls, "[TOOL_CALLS] add(1)", "call is not valid JSON"),
        (mistral_calls, "[TOOL_CALLS] []", "call does not name a tool"),
        (mistral_calls, "[TOOL_CALLS]add[ARGS][1]", "are not a JSON object"),
        (mistral_calls, "[TOOL_CALLS]add[ARGS]", "call is not valid JSON"),
    ],
)
def test_a_broken_call_is_explained_to_the_model(parser, text, error):
    (found,) = parser(text)
    assert error in found["error"] and ". Write it in this form: " in found["error"]
    assert '{"name": "TOOL"' in found["error"] and answered(found).startswith("Error: The ")


AWKWARD = {"name": "say", "arguments": {"text": 'a; b </tool_call> <tool_call>{ [TOOL_CALLS]x[ARGS]; "c"'}}


def test_marks_within_the_strings_of_a_call_do_not_end_it():
    whole, arguments = json.dumps(AWKWARD), json.dumps(AWKWARD["arguments"])
    assert hermes_calls(f"I say:<tool_call>\n{whole}\n</tool_call>\n<tool_call>{whole}</tool_call>") == [AWKWARD] * 2
    of_llama = json.dumps({"name": "say", "parameters": AWKWARD["arguments"]})
    assert llama_calls(of_llama) == [AWKWARD] and llama_calls(f"<|python_tag|>{of_llama}; {of_llama}") == [AWKWARD] * 2
    assert mistral_calls(f"[TOOL_CALLS] [{whole}, {whole}]") == [AWKWARD] * 2
    assert mistral_calls(f"[TOOL_CALLS]say[ARGS]{arguments}[TOOL_CALLS]say[ARGS]{arguments}") == [AWKWARD] * 2


def test_the_newer_form_of_mistral_is_found_and_explained():
    assert mistral_calls(f"I add.[TOOL_CALLS]add[CALL_ID]f00b4r123[ARGS]{json.dumps(CALL['arguments'])}") == [
        {**CALL, "id": "f00b4r123"}
    ]
    parser = parser_of("{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}")
    assert parser("[TOOL_CALLS]add[ARGS]{}") == [{"name": "add", "arguments": {}}]
    [found] = parser("[TOOL_CALLS] add(1)")
    assert found["error"].endswith("Write it in this form: [TOOL_CALLS]TOOL[ARGS]{...}")


@pytest.mark.parametrize(
    ("given", "kept"), [("f00b4r123", True), ("f00b4r12", False), ("f00b4r12-", False), (5, False)]
)
def test_an_id_of_mistral_s_form_is_kept_and_given_back_with_the_answer(given, kept):
    calls = mistral_calls(f"[TOOL_CALLS] [{json.dumps(CALL)}, {json.dumps({**CALL, 'id': given})}]")
    assert calls == [CALL, {**CALL, "id": given} if kept else CALL]
    messages, _ = asyncio.run(Toolbox.of([add], object()).answers(calls))
    assert [message["tool_call_id"] for message in messages] == ["call00000", given if kept else "call00001"]


@hypothesis.given(
    strategies.lists(
        strategies.one_of(
            strategies.sampled_from(
                [
                    "<tool_call>",
                    "</tool_call>",
                    "[TOOL_CALLS]",
                    "a[ARGS]",
                    "<|python_tag|>",
                    '{"name"',
                    '{"name": "a"}',
                    ";",
                ]
            ),
            strategies.text(max_size=6),
        ),
        max_size=12,
    )
)
def test_garbage_never_raises(parts):
    text = "".join(parts)
    for parser in FORMS:
        for found in parser(text):
            assert set(found) in ({"error"}, {"name", "arguments"})
            answered(found)


def test_deeply_nested_json_is_a_broken_call():
    assert "is not valid JSON" in hermes_calls(f"<tool_call>{'[' * 200_000}</tool_call>")[0]["error"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_chooses_the_parser(name):
    template = tokenizer_of(name).chat_template
    assert parser_of(template) is (mistral_calls if name == "mistral" else hermes_calls)
    assert parser_of('... {"name": function name, "parameters": dictionary} ...') is llama_calls


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", {"first": 12, "second": 12}, "24"),
        ("add", {"first": 12}, "12"),
        ("ad", {"first": 12}, "Error: there is no tool 'ad'. Did you mean 'add'? Tools: add."),
        ("add", {"second": 12}, "missing a required argument: 'first'"),
        ("add", {"first": 1, "third": 1}, "unexpected keyword argument 'third'"),
        ("add", {"first": "12"}, "first='12' is not of type int"),
        ("add", {"first": True}, "first=True is not of type int"),
        ("add", {"first": 1, "label": 2}, "label=2 is not of type str"),
        ("add", {"first": 1, "second": 13}, "ValueError: not thirteen"),
    ],
)
def test_a_call_is_answered_or_explained(name, arguments, answer):
    found = answered({"name": name, "arguments": arguments})
    assert answer in found and ("Error" in found) == (answer not in ("24", "12"))


def test_a_schema_has_types_and_descriptions():
    found = tool_schema(calculate)["function"]
    assert isinstance(found, dict) and found["name"] == "calculate"
    assert found["parameters"]["properties"]["operator"] == {"type": "string", "description": "One of +, - and *."}
    assert found["parameters"]["required"] == ["first", "operator", "second"]


def test_a_function_that_cannot_be_described_is_an_error():
    def silent(x): ...

    with pytest.raises(ConfigError, match="'silent' cannot be described") as error:
        tool_schema(silent)
    assert "docstring" in error.value.remedy
    for no_functions in ("add", [partial(calculate, 1)]):
        with pytest.raises(ConfigError, match="not a list of functions"):
            Toolbox.of(no_functions, object())


def test_long_answers_are_cut_off():
    assert len(answered({"name": "add", "arguments": {"first": 1, "label": "x" * 10_000}})) == 4000


def test_coroutine_functions_are_tools_and_names_are_unique():
    async def later(first: int) -> str:
        """Waits.

        Args:
            first: A number.
        """
        return f"later {first}"

    assert answered({"name": "later", "arguments": {"first": 3}}, later) == "later 3"
    with pytest.raises(ConfigError, match="Two tools of the environment are named 'add'") as error:
        Toolbox.of([add, add], object())
    assert "Rename" in error.value.remedy


def answered(call: dict, tool: Callable = add) -> str:
    """The text that the model sees after a call."""
    ((message,), reward) = asyncio.run(Toolbox.of([tool], object()).answers([call]))
    assert message["role"] == "tool" and reward == 0.0
    return str(message["content"])
