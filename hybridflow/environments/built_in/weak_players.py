"""Weak players of the built-in environments, whose games teach a small model the form of replies (`builtin:games`)."""

import json
import random
from collections.abc import Callable

from hybridflow.environments.interface import Message

Player = Callable[[list[Message], random.Random], str]
"""The reply to a conversation."""


def guess(messages: list[Message], draw: random.Random) -> str:
    """In two of three cases a number on the right side of the last guess, otherwise any number."""
    lowest, highest = 1, 15
    if len(messages) > 1 and draw.random() < 2 / 3:
        last, answer = int(str(messages[-2]["content"])), messages[-1]["content"]
        lowest, highest = (1, last - 1) if answer == "lower" else (last + 1, 15)
    return str(draw.randint(lowest, highest))


def walk(messages: list[Message], draw: random.Random) -> str:
    """Any direction."""
    return draw.choice(("left", "down", "right", "up"))


def bet(messages: list[Message], draw: random.Random) -> str:
    """Passes or bets."""
    return draw.choice(("pass", "bet"))


def calculate(messages: list[Message], draw: random.Random) -> str:
    """Answers by chance, or calls the tool with any operator; one number in three is copied with a wrong digit."""
    if messages[-1]["role"] == "tool":
        return carelessly(str(messages[-1]["content"]), draw)
    if draw.random() < 0.5:
        return str(draw.randint(100, 9999))
    first, second = (carelessly(text, draw) for text in str(messages[-1]["content"]).removesuffix("=").split("*"))
    arguments = {"first": int(first), "operator": draw.choice("+-*"), "second": int(second)}
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': arguments})}</tool_call>"


def carelessly(number: str, draw: random.Random) -> str:
    """The number, with another digit in one of three cases."""
    place = draw.randrange(len(number))
    if draw.random() < 2 / 3 or not number[place].isdigit():
        return number
    return f"{number[:place]}{draw.randint(1, 9)}{number[place + 1 :]}"


PLAYERS: dict[str, Player] = {"guess_number": guess, "calculator": calculate, "frozen_lake": walk, "kuhn_poker": bet}
"""The player of each built-in environment."""
