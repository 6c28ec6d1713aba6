"""A calculator as a tool, for sums that the model cannot do itself."""

import re
from collections.abc import Callable, Mapping
from typing import ClassVar

_NUMBER = re.compile(r"-?\d+")


def calculate(first: int, operator: str, second: int) -> str:
    """Adds, subtracts or multiplies two integers.

    Args:
        first: The first integer.
        operator: One of +, - and *.
        second: The second integer.
    """
    if max(abs(first), abs(second)) >= 10**12:
        return "Error: the numbers must have at most 12 digits."
    results = {"+": first + second, "-": first - second, "*": first * second}
    return str(results[operator]) if operator in results else "Error: the operator must be +, - or *."


class CalculatorTool:
    """The model answers a question of the data, and may call the tool `calculate` before; the reward is 1 if the last
    number of its reply is the column `answer`, and 0 otherwise."""

    tools: ClassVar[list[Callable[..., object]]] = [calculate]

    def __init__(self) -> None:
        self._answer = ""

    def reset(self, row: Mapping[str, object]) -> None:
        """Remembers the answer; the prompt is that of the row."""
        self._answer = str(row["answer"]).strip()

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """Compares the answer; the episode ends."""
        numbers = _NUMBER.findall(action)
        is_right = bool(numbers) and numbers[-1] == self._answer
        return "", float(is_right), True, {"is_right": is_right}
