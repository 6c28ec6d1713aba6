"""Weak players of the built-in environments, whose games teach a small model the form of replies (`builtin:games`)."""

import json
import random
from collections.abc import Callable

from hybridflow.environments.interface import Message

Player = Callable[[list[Message], random.Random], str]
"""The reply to a conversation."""


def guess(messages: list[Message], draw: random.Random) -> str:
    """In one of two cases a number that agrees with all answers, otherwise any number."""
    lowest, highest = 1, 15
    if draw.random() < 1 / 2:
        for said, heard in zip(messages[1::2], messages[2::2], strict=True):
            number = int(str(said["content"]))
            if heard["content"] == "lower":
                highest = min(highest, number - 1)
            else:
                lowest = max(lowest, number + 1)
    return str(draw.randint(lowest, highest))


def walk(messages: list[Message], draw: random.Random) -> str:
    """Any direction."""
    return draw.choice(("left", "down", "right", "up"))


def bet(messages: list[Message], draw: random.Random) -> str:
    """Bets with probability 1/4, 1/2 or 3/4 for a jack, queen or king, and ignores the other player."""
    card = str(messages[0]["content"]).split()[1]
    return "bet" if draw.random() < ("JQK".index(card) + 1) / 4 else "pass"


def calculate(messages: list[Message], draw: random.Random) -> str:
    """Answers by chance, or calls the tool with any operator and repeats what it returns."""
    if messages[-1]["role"] == "tool":
        return str(messages[-1]["content"])
    if draw.random() < 1 / 2:
        return str(draw.randint(100, 9999))
    first, second = map(int, str(messages[-1]["content"]).removesuffix("=").split("*"))
    arguments = {"first": first, "operator": draw.choice("+-*"), "second": second}
    return f"<tool_call>{json.dumps({'name': 'calculate', 'arguments': arguments})}</tool_call>"


PLAYERS: dict[str, Player] = {"guess_number": guess, "calculator": calculate, "frozen_lake": walk, "kuhn_poker": bet}
"""The player of each built-in environment."""
