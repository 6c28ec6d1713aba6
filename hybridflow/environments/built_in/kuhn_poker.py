"""Kuhn poker in self-play: the model plays both seats, and learns from one of them."""

import random
from collections.abc import Mapping

from hybridflow.environments.interface import Message, Model

CARDS = "JQK"
_WORDS = {"p": "pass", "b": "bet"}
_END = ("pp", "bp", "bb", "pbp", "pbb")


async def kuhn_poker(model: Model, row: Mapping[str, object], seed: int) -> tuple[float, dict]:
    """One game with an ante of 1 and bets of 1; the reward is what the learning seat wins, from -2 to 2.

    Both players see their card and the moves so far, and reply `pass` or `bet`; anything else is a pass. Seats
    alternate with the seed, which also deals the cards. The value of the game is -1/18 for the first seat (Kuhn, 1950).
    """
    draw = random.Random(seed)
    cards, learner = draw.sample(CARDS, 2), seed % 2
    seen: list[list[Message]] = [_opening(row, card) for card in cards]
    history = ""
    while history not in _END:
        seat = len(history) % 2
        reply = await model.reply(seen[seat], trained=seat == learner)
        move = "b" if reply.text.strip().lower() == "bet" else "p"
        seen[seat].append(reply.message)
        history += move
        seen[1 - seat] = _told(seen[1 - seat], _WORDS[move])
    winnings = won(history, cards)
    return winnings if learner == 0 else -winnings, {"is_first": learner == 0}


def won(history: str, cards: list[str]) -> float:
    """The winnings of the first player in a finished game."""
    if history in ("bp", "pbp"):
        return 1.0 if history == "bp" else -1.0
    stake = 1.0 if history == "pp" else 2.0
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


def _opening(row: Mapping[str, object], card: str) -> list[Message]:
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "content": f"{prompt}{card}"}]
    assert isinstance(prompt, list), f"a prompt of type {type(prompt)}"
    return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{card}"}]


def _told(seen: list[Message], word: str) -> list[Message]:
    """The conversation with the other player's move: part of the opening, or a message after one's own reply."""
    if seen[-1]["role"] == "user":
        return [*seen[:-1], {**seen[-1], "content": f"{seen[-1]['content']} {word}"}]
    return [*seen, {"role": "user", "content": f" {word}"}]
