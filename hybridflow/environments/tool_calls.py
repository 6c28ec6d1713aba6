"""Parsers of tool calls in the text of a reply: the forms of Hermes and Qwen, of Llama, and of Mistral."""

import json
import re
from collections.abc import Callable
from functools import partial

ToolCalls = list[dict]
"""Calls in order, each with `name` and `arguments`, or with an `error` that explains to the model what is wrong.

Those of Mistral also have the `id` that the model gave them, if it has nine letters or digits.
"""

Parser = Callable[[str], ToolCalls]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON, _MISTRAL, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_HOW_HERMES = '<tool_call>\n{"name": "TOOL", "arguments": {...}}\n</tool_call>'
_HOW_LLAMA = '{"name": "TOOL", "parameters": {...}}'
_HOW_MISTRAL = '[TOOL_CALLS] [{"name": "TOOL", "arguments": {...}}]'
_HOW_NAMED = "[TOOL_CALLS]TOOL[ARGS]{...}"

_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?\[ARGS\]")
_ID = re.compile(r"[A-Za-z0-9]{9}")


def hermes_calls(text: str) -> ToolCalls:
    """Calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes 2 and Qwen 2.5."""
    calls, start = [], text.find(_BEGIN)
    while start >= 0:
        start += len(_BEGIN)
        found, end = _json_at(text, start)
        if isinstance(found, _Flaw):
            ends = [place for place in (text.find(mark, start) for mark in (_END, _BEGIN)) if place >= 0]
            end = min(ends, default=len(text))
        elif (rest := text[end:].lstrip()) and not rest.startswith((_END, _BEGIN)):
            found = _Flaw(f"does not end after its JSON object, but continues with {rest[:40]!r}")
        calls.append(_checked(found, "arguments", _HOW_HERMES))
        start = text.find(_BEGIN, end)
    return calls


def llama_calls(text: str) -> ToolCalls:
    """Calls that are the whole reply: `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not (Llama 3).

    Several calls are separated by semicolons.
    """
    body = text.strip().removeprefix(_PYTHON).strip()
    if _PYTHON not in text and not (body.startswith("{") and '"name"' in body):
        return []
    calls, place = [], 0
    while place < len(body):
        found, place = _json_at(body, place)
        calls.append(_checked(found, "parameters", _HOW_LLAMA))
        if isinstance(found, _Flaw):
            break
        place = len(body) - len(body[place:].lstrip("; \n"))
    return calls


def mistral_calls(text: str, how: str = _HOW_MISTRAL) -> ToolCalls:
    """Calls in a list after `[TOOL_CALLS]`, as in Mistral 7B v0.3, or each as `[TOOL_CALLS]name[ARGS]{...}`, as in
    Mistral Small 3.2 and later models."""
    place, calls = text.find(_MISTRAL), []
    while place >= 0:
        place += len(_MISTRAL)
        named = _NAMED.match(text, place)
        found, end = _json_at(text, place if named is None else named.end())
        if named is not None and not isinstance(found, _Flaw):
            found = {"name": named[1], "arguments": found, "id": named[2]}
        listed = found if isinstance(found, list) and found else [found]
        calls += [_with_id(_checked(item, "arguments", how), item) for item in listed]
        place = text.find(_MISTRAL, max(place, end))
    return calls


_MARKS: tuple[tuple[str, Parser], ...] = (
    (_ARGS, partial(mistral_calls, how=_HOW_NAMED)),
    (_MISTRAL, mistral_calls),
    (_BEGIN, hermes_calls),
    (_PYTHON, llama_calls),
    ('"parameters"', llama_calls),
)
"""Texts by which a chat template shows the form of its tool calls."""


def parser_of(chat_template: str | None) -> Parser:
    """The parser for the form of tool calls in a chat template; Hermes's form if the template shows none."""
    return next((parser for mark, parser in _MARKS if mark in (chat_template or "")), hermes_calls)


class _Flaw(str):
    """The reason why a call cannot be made."""


def _json_at(text: str, place: int) -> tuple[object, int]:
    """The JSON value that begins at a place of a text, after white space, and where it ends."""
    rest = text[place:].lstrip()
    try:
        found, size = json.JSONDecoder().raw_decode(rest)
    except (ValueError, RecursionError) as error:
        return _Flaw(f"is not valid JSON ({error})"), place
    return found, len(text) - len(rest) + size


def _checked(found: object, arguments_key: str, how: str) -> dict:
    if isinstance(found, _Flaw):
        return _wrong(f"The tool call {found}", how)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return _wrong("The tool call does not name a tool", how)
    arguments = found.get(arguments_key, found.get("arguments", {}))
    if not isinstance(arguments, dict):
        return _wrong("The arguments of the tool call are not a JSON object", how)
    return {"name": found["name"], "arguments": arguments}


def _with_id(call: dict, found: object) -> dict:
    """A call with the id that was found with it, unless that is not of Mistral's form."""
    own = found.get("id") if isinstance(found, dict) and "error" not in call else None
    return {**call, "id": own} if isinstance(own, str) and _ID.fullmatch(own) else call


def _wrong(what: str, how: str) -> dict:
    return {"error": f"{what}. Write it in this form: {how}"}
