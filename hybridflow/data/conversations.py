"""Prompts and responses of data files: text, messages, or dialogues in one text; checked cell by cell."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from hybridflow.config.data import Data
from hybridflow.data.sources import Table
from hybridflow.errors import DataError

Message = dict[str, str]
Prompt = str | list[Message]
Response = str | list[Message]

_REPLY_BEGINS = "\n\nAssistant:"
"""In dialogues written as one text, as in Anthropic's HH data: `\\n\\nHuman: ...\\n\\nAssistant: ...`."""


def as_conversation(prompt: Prompt, config: Data, opening: Sequence[Message] = ()) -> Prompt:
    """The prompt as the model sees it: `data.as_chat` makes a text the user's turn, and `data.system_prompt` is added
    to a conversation without a system message.

    `opening` has turns of the row before the prompt, for a conversation: a system message, unless the conversation has
    one, and earlier turns, unless it has several.
    """
    if isinstance(prompt, str):
        if not config.as_chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    own = 1 if prompt[0]["role"] == "system" else 0
    systems = prompt[:own] or [turn for turn in opening if turn["role"] == "system"]
    if not systems and config.system_prompt is not None:
        systems = [{"role": "system", "content": config.system_prompt}]
    earlier = [turn for turn in opening if turn["role"] != "system"] if len(prompt) == own + 1 else []
    return [*systems, *earlier, *prompt[own:]]


def last_reply_start(text: str) -> int:
    """Index of the assistant's last reply in a dialogue written as one text; 0 if there is none."""
    found = text.rfind(_REPLY_BEGINS)
    return 0 if found < 0 else found + len(_REPLY_BEGINS)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of equal characters or turns that both begin with."""
    same = min(len(first), len(second))
    return next((i for i in range(same) if first[i] != second[i]), same)


def check_prompts(prompts: Sequence[object], table: Table) -> None:
    """Raises `DataError` with the file and row of the first prompt that is neither text nor messages."""
    for row, prompt in enumerate(prompts):
        checked(prompt, what="prompt", place=table.place(row))


def response_of(value: object, *, what: str, place: str) -> Response:
    """A cell of a table as a response; `what` and `place` are for errors: `chosen response`, `row 3 of 'a.jsonl'`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else checked(value, what=what, place=place)


def checked(value: object, *, what: str, place: str) -> Prompt | Response:
    """The value; raises `DataError` unless it is text, or messages with a role and content, and not empty."""
    flaw = text_flaw(value)
    if flaw is not None or not isinstance(value, str | list):
        remedy = 'Give text, or messages such as [{"role": "user", "content": "..."}]; or leave the row out.'
        raise row_error(place, f"has a {what} that {flaw}", remedy)
    return value


def text_flaw(value: object) -> str | None:
    """Why a value is not text or messages with a role and content, or is empty; else None."""
    if value in ("", []):
        return "is empty"
    if isinstance(value, str):
        return None
    if not isinstance(value, list):
        return f"is {'missing' if value is None else f'of type {type(value).__name__}'}, not text or messages"
    for message in value:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
            return f"has a message without role and content: {str(message)[:80]}"
        parts = message["content"] if isinstance(message["content"], list) else []
        if kinds := sorted({str(part.get("type")) for part in parts if isinstance(part, dict)} - {"text"}):
            return f"has content of the type {', '.join(kinds)}, but only text is supported"
    return None


def split_completion(prompt: Prompt, completion: Response, *, place: str) -> tuple[Prompt, Response]:
    """Both in one form: if the completion is messages, so is the prompt, and the completion does not repeat it."""
    if isinstance(completion, str):
        return prompt, completion[repeated_length(prompt, completion) :]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rest = completion[len(turns) :] if completion[: len(turns)] == turns else completion
    if isinstance(prompt, str) and rest and rest[0]["role"] != "assistant":
        raise row_error(
            place,
            f"has a text as its prompt, and a completion that begins with the turn of '{rest[0]['role']}'",
            "Begin it with the assistant's turn, or give the prompt as messages.",
        )
    check_end(rest, what="completion", place=place)
    return turns, rest


def repeated_length(prompt: Prompt, response: Response) -> int:
    """The number of characters at which a text's own part begins if the text repeats its prompt; else 0."""
    if not (isinstance(prompt, str) and isinstance(response, str) and response.startswith(prompt)):
        return 0
    is_word_cut = response[len(prompt) - 1 : len(prompt) + 1].isalnum()
    return 0 if is_word_cut or not prompt.strip() or not response[len(prompt) :].strip() else len(prompt)


def say_repeated(written: Sequence[object], used: Sequence[object], table: Table) -> None:
    """Warns of texts that repeated their prompts, of which only the rest is used."""
    both = zip(written, used, strict=True)
    cut = sum(isinstance(text, str) and isinstance(rest, str) and len(rest) < len(text) for text, rest in both)
    if cut:
        table.log(logging.WARNING, "%d of %d responses begin with their prompt, which is cut off", cut, len(table))


def check_end(response: Response, *, what: str, place: str) -> None:
    """Raises `DataError` if the response is empty or its last turn is not the assistant's."""
    if not response:
        raise row_error(place, f"has an empty {what}", "Write what follows the prompt, or leave the row out.")
    if isinstance(response, list) and response[-1]["role"] != "assistant":
        raise row_error(place, f"has a {what} that does not end with the assistant's turn", "End it with a reply.")


def is_blank(response: Response) -> bool:
    """Whether a response is only white space, and calls no tool."""
    if isinstance(response, str):
        return not response.strip()
    replies = [turn for turn in response if turn["role"] == "assistant"]
    return not any(str(turn["content"] or "").strip() or turn.get("tool_calls") for turn in replies)


def is_learned(turn: Mapping[str, object]) -> bool:
    """Whether a turn is the assistant's and to be learned: without `"weight": 0` (OpenAI) or `"train": false`."""
    return turn["role"] == "assistant" and turn.get("weight") != 0 and turn.get("train") is not False


def rows_without(flaws: Mapping[str, Sequence[int]], table: Table, *, of: str) -> list[int]:
    """Positions of the rows that have none of the flaws; logs the others. Raises `DataError` if no row is left.

    `flaws` are positions by flaw; `of` is what a row holds, in the plural.
    """
    for flaw, rows in flaws.items():
        if rows:
            numbers = ", ".join(str(table.number(row)) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
            table.log(logging.WARNING, "leaves out %d of %d %s: %s (rows %s)", len(rows), len(table), of, flaw, numbers)
    kept = sorted({*range(len(table))}.difference(*flaws.values()))
    if not kept and not table.is_part:
        reasons = ", ".join(f"{flaw} ({len(rows)})" for flaw, rows in flaws.items() if rows)
        raise DataError(f"'{table.name}' has no usable {of}: {reasons}.", remedy="Give rows with text to learn.")
    return kept


def duplicates(rows: Iterable[object], table: Table) -> int:
    """The number of rows that repeat an earlier one; parts of a stream, which are not announced, are not counted."""
    digests = [] if table.is_part else [hash(str(row)) for row in rows]
    return len(digests) - len({*digests})


def row_error(place: str, what: str, remedy: str) -> DataError:
    """The error `Row 3 of 'a.jsonl' has no chosen response.`"""
    return DataError(f"{place[:1].upper()}{place[1:]} {what}.", remedy=remedy)
