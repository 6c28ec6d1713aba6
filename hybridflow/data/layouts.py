"""Public layouts of data sets that do not have our columns: recognized by their columns, and rewritten as ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridflow.data.column_names import PROMPTS
from hybridflow.data.sources import Table
from hybridflow.errors import DataError

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""The speakers of ShareGPT conversations and OpenAssistant messages."""


@dataclass(frozen=True)
class Layout:
    """A public layout: the columns that identify it, and how they become `prompt`, `answer` or `messages`."""

    name: str
    known_by: tuple[str, ...]
    rewritten: Callable[[Table], Table]


def recognized(table: Table, prompt_key: str | None = None) -> Table:
    """The table with our columns if it has a public layout, whose name is then the table's `layout`.

    With `prompt_key`, that column has the prompts, whatever the other columns are; its turns become messages.
    """
    if prompt_key is not None:
        if prompt_key not in table.columns:
            return table
        turns = [_messages(value) for value in table.columns[prompt_key]]
        return replace(table, columns={**table.columns, prompt_key: turns})
    for layout in LAYOUTS:
        if all(name in table.columns for name in layout.known_by):
            found = layout.rewritten(table)
            if found is not table and table.is_part and len(found) != len(table):
                raise DataError(
                    f"'{table.name}' has the layout of {layout.name}, in which several rows make one, so its rows"
                    " cannot be read one by one (data.streaming=true).",
                    remedy="Set data.streaming=false, or write one conversation per row.",
                )
            if found is not table:
                return replace(found, layout=layout.name)
    return table


def _sharegpt(table: Table) -> Table:
    """Conversations of turns with `from` and `value`."""
    columns = dict(table.columns)
    name = "prompt" if "chosen" in columns and "rejected" in columns else "messages"
    if name in columns:
        return table
    conversations = [_messages(value) for value in columns.pop("conversations")]
    columns |= {
        column: [_messages(value) for value in columns[column]] for column in ("chosen", "rejected") if name == "prompt"
    }
    return replace(table, columns={name: conversations} | columns)


def _messages(value: object) -> object:
    """Turns of ShareGPT as messages; one turn as a list of it; anything else as it is."""
    turns = [value] if isinstance(value, Mapping) else value
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        return value
    return [_message(turn) for turn in turns]


def _message(turn: object) -> object:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("from"), str) or "value" not in turn:
        return turn
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return {"role": _ROLES.get(turn["from"].lower(), turn["from"]), "content": turn["value"], **others}


_OTHER_FORMS = (*PROMPTS, "raw_prompt", "messages", "text", "chosen")
"""Columns with which `data` is not a dialogue."""


def _ultrachat(table: Table) -> Table:
    """UltraChat as published: texts of the user and the assistant in turn."""
    if table.first(_OTHER_FORMS) is not None or not all(_are_texts(value) for value in table.columns["data"]):
        return table
    columns = dict(table.columns)
    dialogues = columns.pop("data")
    messages = [
        [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
        for texts in dialogues
    ]
    return replace(table, columns={"messages": messages} | columns)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(text, str) for text in value)


def _open_assistant(table: Table) -> Table:
    """Trees of messages: each reply of the assistant without a reply gives a row with the turns that lead to it."""
    columns = table.columns
    by_id = {name: row for row, name in enumerate(columns["message_id"])}
    answered = {*columns["parent_id"]}
    ends = [
        row
        for row, name in enumerate(columns["message_id"])
        if name not in answered and _ROLES.get(str(columns["role"][row])) == "assistant"
    ]
    if not ends:
        return table
    found = [_branch(row, by_id, table) for row in ends]
    kept = table.select(ends)
    used = ("message_id", "parent_id", "text", "role")
    others = {name: values for name, values in kept.columns.items() if name not in used}
    return replace(kept, columns={"messages": found} | others)


def _branch(row: int, by_id: Mapping[object, int], table: Table) -> list[dict[str, object]]:
    """The turns from the first message of a tree to this one."""
    columns, turns, place = table.columns, [], table.place(row)
    while True:
        role = _ROLES.get(str(columns["role"][row]), columns["role"][row])
        turns.append({"role": role, "content": columns["text"][row]})
        parent = columns["parent_id"][row]
        if parent is None or len(turns) > len(by_id):
            return turns[::-1]
        if parent not in by_id:
            raise DataError(
                f"The message in {place} answers the message {parent}, which '{table.name}' does not have.",
                remedy="Give whole trees of messages, or leave such rows out with data.map.",
            )
        row = by_id[parent]


def _alpaca(table: Table) -> Table:
    """An instruction, and what it is given, which may be in several columns: an input (Alpaca), a context (Dolly)."""
    if "prompt" in table.columns:
        return table
    given = [table.columns[name] for name in ("context", "input", "question") if name in table.columns]
    prompts = [_with_given(*parts) for parts in zip(table.columns["instruction"], *given, strict=True)]
    return replace(table, columns={"prompt": prompts} | table.columns)


def _with_given(instruction: object, *given: object) -> object:
    if not isinstance(instruction, str):
        return instruction
    return "\n\n".join([instruction, *(str(part) for part in given if part is not None and str(part).strip())])


def _svamp(table: Table) -> Table:
    """A story and a question about it; the answers are whole numbers, written as `145.0`."""
    both = zip(table.columns["Body"], table.columns["Question"], strict=True)
    columns = {"prompt": [f"{body} {question}" if body else question for body, question in both]} | table.columns
    answers = columns.pop("Answer", [None] * len(table))
    columns["answer"] = [_whole(answer) for answer in answers]
    return replace(table, columns=columns)


def _whole(answer: object) -> object:
    if isinstance(answer, float) and answer.is_integer():
        return int(answer)
    return answer.removesuffix(".0") if isinstance(answer, str) else answer


LAYOUTS = (
    Layout("ShareGPT", ("conversations",), _sharegpt),
    Layout("OpenAssistant", ("message_id", "parent_id", "text", "role"), _open_assistant),
    Layout("UltraChat", ("data",), _ultrachat),
    Layout("Alpaca", ("instruction", "input"), _alpaca),
    Layout("Alpaca", ("instruction", "output"), _alpaca),
    Layout("Dolly", ("instruction", "context"), _alpaca),
    Layout("Dolly", ("instruction", "response"), _alpaca),
    Layout("Alpaca", ("instruction", "question"), _alpaca),
    Layout("SVAMP", ("Body", "Question"), _svamp),
)
"""The first that fits is taken."""
