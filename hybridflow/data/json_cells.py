"""Messages and objects that a file has as text: JSON, or Python's notation, as in tables written by pandas."""

import ast
import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace

from hybridflow.config.data import Data
from hybridflow.data.column_names import COMPLETIONS, PROMPTS
from hybridflow.data.conversations import row_error
from hybridflow.data.sources import Table

_MESSAGES = (*PROMPTS, *COMPLETIONS, "messages", "conversations", "raw_prompt", "chosen", "rejected")
_OBJECTS = ("reward_model", "reward_spec")
_TURN = re.compile(r"""\s*(\[\s*)?\{\s*["'](role|content|from|value)["']\s*:""")
_OBJECT = re.compile(r"""\s*\{\s*["']""")


def with_parsed_cells(table: Table, config: Data) -> Table:
    """The table with messages in place of texts that hold them, in columns of prompts and responses, and with objects
    in columns of which an answer is taken.

    Raises `DataError` for a text that begins as one of them and cannot be parsed.
    """
    forms: dict[str, tuple[re.Pattern[str], Callable[[object], bool]]] = {}
    forms |= {name: (_TURN, _are_messages) for name in (*_MESSAGES, config.prompt_key) if name is not None}
    outer = (config.answer_key or "").partition(".")
    objects = (*_OBJECTS, *(outer[:1] if outer[2] else ()))
    forms |= dict.fromkeys(objects, (_OBJECT, lambda value: isinstance(value, dict)))
    columns = {name: _parsed_column(name, *forms[name], table) for name in table.columns if name in forms}
    changed = {name: values for name, values in columns.items() if values is not table.columns[name]}
    if not changed:
        return table
    table.log(logging.INFO, "columns=%s hold JSON as text, which is parsed", ",".join(changed))
    return replace(table, columns=table.columns | changed)


def _parsed_column(name: str, begins: re.Pattern[str], fits: Callable[[object], bool], table: Table) -> list:
    values = table.columns[name]
    texts = {row: text for row, text in enumerate(values) if isinstance(text, str) and begins.match(text)}
    if not texts:
        return values
    found = list(values)
    for row, text in texts.items():
        parsed = _parsed(text)
        if not fits(parsed):
            raise row_error(
                table.place(row),
                f"has a text in the column '{name}' that begins as JSON and cannot be parsed: {text.strip()[:80]!r}",
                "Write it with json.dumps(...); if it is meant as text, set data.prompt_template='{" + name + "}'.",
            )
        found[row] = parsed
    return found


def _parsed(text: str) -> object:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _are_messages(value: object) -> bool:
    turns = value if isinstance(value, list) else [value]
    return all(
        isinstance(turn, dict) and ({"role", "content"} <= {*turn} or {"from", "value"} <= {*turn}) for turn in turns
    )
