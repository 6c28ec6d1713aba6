"""Parsers of tool calls in the text of a reply: the forms of Hermes and Qwen, of Llama, and of Mistral."""

import json
import re
from collections.abc import Callable

ToolCalls = list[dict]
"""Calls in order, each with `name` and `arguments`, or with an `error` that explains to the model what is wrong."""

Parser = Callable[[str], ToolCalls]

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_HOW_HERMES = '<tool_call>\n{"name": "TOOL", "arguments": {...}}\n</tool_call>'
_HOW_LLAMA = '{"name": "TOOL", "parameters": {...}}'
_HOW_MISTRAL = '[TOOL_CALLS] [{"name": "TOOL", "arguments": {...}}]'


def hermes_calls(text: str) -> ToolCalls:
    """Calls in the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as in Hermes 2 and Qwen 2.5."""
    return [_call(found[1], "arguments", _HOW_HERMES) for found in _HERMES.finditer(text)]


def llama_calls(text: str) -> ToolCalls:
    """A call that is the whole reply: `{"name": ..., "parameters": {...}}`, after `<|python_tag|>` or not (Llama 3)."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    is_marked = "<|python_tag|>" in text
    if not is_marked and not (body.startswith("{") and '"name"' in body):
        return []
    return [_call(part, "parameters", _HOW_LLAMA) for part in body.split("; ") if part]


def mistral_calls(text: str) -> ToolCalls:
    """Calls in a list after `[TOOL_CALLS]`, as in Mistral 7B v0.3 and later models."""
    _, marker, body = text.partition("[TOOL_CALLS]")
    if not marker:
        return []
    try:
        listed, _ = json.JSONDecoder().raw_decode(body.strip())
    except (ValueError, RecursionError) as error:
        return [_wrong(f"no JSON ({error})", _HOW_MISTRAL)]
    found = listed if isinstance(listed, list) and listed else [listed]
    return [_checked(item, "arguments", _HOW_MISTRAL) for item in found]


_MARKS: tuple[tuple[str, Parser], ...] = (
    ("[TOOL_CALLS]", mistral_calls),
    ("<tool_call>", hermes_calls),
    ("<|python_tag|>", llama_calls),
    ('"parameters"', llama_calls),
)
"""Texts by which a chat template shows the form of its tool calls."""


def parser_of(chat_template: str | None) -> Parser:
    """The parser for the form of tool calls in a chat template; Hermes's form if the template shows none."""
    return next((parser for mark, parser in _MARKS if mark in (chat_template or "")), hermes_calls)


def _call(text: str, arguments_key: str, how: str) -> dict:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _wrong(f"no JSON ({error})", how)
    return _checked(found, arguments_key, how)


def _checked(found: object, arguments_key: str, how: str) -> dict:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return _wrong("without the name of a tool", how)
    arguments = found.get(arguments_key, found.get("arguments", {}))
    if not isinstance(arguments, dict):
        return _wrong("whose arguments are not an object", how)
    return {"name": found["name"], "arguments": arguments}


def _wrong(what: str, how: str) -> dict:
    return {"error": f"This is a tool call {what}. Write {how}"}
