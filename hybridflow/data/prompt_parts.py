"""Columns of their own for parts of a prompt: system messages and earlier turns; and a warning of unused ones."""

import logging
from collections.abc import Sequence

from hybridflow.config.data import Data
from hybridflow.config.templates import template_parts
from hybridflow.data.conversations import Message
from hybridflow.data.layouts import recognized
from hybridflow.data.sources import Table

_SYSTEMS = ("system", "system_prompt")
_HISTORY = "history"
_PARTS = (
    *_SYSTEMS, _HISTORY, "tools", "functions",
    "instruction", "input", "question", "problem", "query", "body",
    "context", "contexts", "passage", "document", "article", "story", "paragraph", "support", "premise", "hypothesis",
    "facts", "table", "schema", "starter_code",
    "choices", "options", "endings", "a", "b", "c", "d", "opa", "opb", "opc", "opd",
)  # fmt: skip
"""Columns that data sets show to the model, in lower case."""


def openings(table: Table, config: Data) -> list[list[Message]]:
    """The turns before each row's prompt that are in columns of their own: a system message, then `history`.

    Columns that `data.prompt_template` uses are in the prompt already.
    """
    used = {name for _, name in template_parts(config.prompt_template)} if config.prompt_template else {None}
    names = [name for name in (table.first(_SYSTEMS), _HISTORY) if name in table.columns and name not in used]
    found: list[list[Message]] = [[] for _ in range(len(table))]
    for name in names:
        for turns, value in zip(found, table.columns[name], strict=True):
            turns += _system(value) if name in _SYSTEMS else _history(value)
    return found


def warn_of_unused(shown: Sequence[object], table: Table, config: Data) -> None:
    """Logs a warning if columns look like parts of the prompt, but what each row shows the model does not have them."""
    if table.is_part or config.prompt_template is not None:
        return
    texts = [" ".join(_leaves(value)) for value in shown]
    names = [
        name
        for name, values in table.columns.items()
        if name.lower() in _PARTS and not all(_holds(text, value) for text, value in zip(texts, values, strict=True))
    ]
    if not names:
        return
    layout = recognized(table).layout if config.prompt_key else ""
    ways = [f"data.prompt_key=null (the layout {layout} is recognized)"] if layout else []
    is_text = isinstance(shown[0], str)
    if is_text and any(name in (*_SYSTEMS, _HISTORY) for name in names):
        ways.append("data.as_chat=true (for system messages and history)")
    if is_text and all(isinstance(value, str | int | float) for value in table.columns[names[0]]):
        ways.append(f"data.prompt_template='... {{{names[0]}}} ...'")
    table.log(
        logging.WARNING,
        "columns=%s look like parts of the prompt, but are not used; to use them, set %s",
        ",".join(names), " or ".join([*ways, "data.map=FILE:FUNCTION"]),
    )  # fmt: skip


def _system(value: object) -> list[Message]:
    return [{"role": "system", "content": value}] if isinstance(value, str) and value.strip() else []


def _history(value: object) -> list[Message]:
    """Earlier turns in pairs of texts, as in LLaMA-Factory; none if they have another form."""
    pairs = value if isinstance(value, list) else []
    if not all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in pairs):
        return []
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _holds(text: str, value: object) -> bool:
    """Whether a text contains all texts and numbers of a value, apart from white space."""
    return all(part in text for part in _leaves(value))


def _leaves(value: object) -> list[str]:
    """The texts and numbers in a value, without empty ones."""
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    words = "" if value is None else " ".join(str(value).split())
    return [] if words in ("", "[]", "{}") else [words]
