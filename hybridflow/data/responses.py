"""Responses as people write them: text or messages, which may hold the prompt once more; and those that say nothing."""

import logging
from collections.abc import Sequence

from hybridflow.data.chat import Message, Prompt, prompt_flaw
from hybridflow.data.table import Table
from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

Response = str | list[Message]


def response_of(value: object, *, what: str, place: str) -> Response:
    """A cell of a table as a response; `what` and `place` are for errors: `chosen response`, `row 3 of 'a.jsonl'`."""
    if value is None or value in ("", []):
        raise fault(place, f"has no {what}", "Fill it in, or leave the row out.")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    flaw = prompt_flaw(value)
    if flaw is not None or not isinstance(value, str | list):
        raise fault(place, f"has a {what} that {flaw}", "Give text, or messages with role and content.")
    return value


def behind_prompt(prompt: Prompt, response: Response, *, what: str, place: str) -> tuple[Prompt, Response]:
    """Both in one way of writing: of messages the prompt is messages too, which the response does not repeat."""
    if isinstance(response, str):
        return prompt, response
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    rest = response[len(turns) :] if response[: len(turns)] == turns else response
    if isinstance(prompt, str) and rest and rest[0]["role"] != "assistant":
        raise fault(
            place,
            f"has a text as its prompt, and a {what} that begins with the turn of '{rest[0]['role']}'",
            "Let it begin with the assistant's turn, or give the prompt as messages.",
        )
    check_end(rest, what=what, place=place)
    return turns, rest


def check_end(response: Response, *, what: str, place: str) -> None:
    """Raises `DataError` for a response in which the assistant does not have the last word."""
    if not response:
        raise fault(place, f"has an empty {what}", "Write what follows the prompt, or drop it.")
    if isinstance(response, list) and response[-1]["role"] != "assistant":
        raise fault(place, f"does not end with the assistant's turn in its {what}", "Let a reply be last.")


def is_blank(response: Response) -> bool:
    """White space alone, and no call of a tool."""
    if isinstance(response, str):
        return not response.strip()
    spoken = [turn for turn in response if turn["role"] == "assistant"]
    return not any(str(turn["content"] or "").strip() or turn.get("tool_calls") for turn in spoken)


def rows_that_speak(responses: Sequence[Response], table: Table) -> list[int]:
    """Positions of the rows whose response is not blank; logs those left out, which must not be all."""
    silent = [row for row, response in enumerate(responses) if is_blank(response)]
    if len(silent) == len(responses):
        raise DataError(f"'{table.name}' has blank completions alone.", remedy="Give text that follows the prompts.")
    if silent:
        logger.warning("data=%s leaves out %d of %d rows: blank completions (rows %s)",
                       table.name, len(silent), len(responses), numbers_of(silent, table))  # fmt: skip
    left_out = set(silent)
    return [row for row in range(len(responses)) if row not in left_out]


def numbers_of(rows: Sequence[int], table: Table) -> str:
    """`2, 5, 7`: the first few rows by their numbers in the source."""
    return ", ".join(str(table.number(row)) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")


def fault(place: str, what: str, remedy: str) -> DataError:
    """The error `Row 3 of 'a.jsonl' has no chosen response.`"""
    return DataError(f"{place[:1].upper()}{place[1:]} {what}.", remedy=remedy)
