"""Games of TextArena: `get_observation` returns (player, observation), `step` (done, info), and `close` the rewards.

The model plays all seats, and learns from one of them, which the seed chooses.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Make, Methods
from hybridflow.environments.interface import EpisodeOver, Finished, Message, Model
from hybridflow.errors import EpisodeError


class _Game(Protocol):
    def reset(self, num_players: int, seed: int | None = None) -> object: ...

    def get_observation(self) -> tuple[int, object]: ...

    def step(self, action: str) -> tuple[bool, object]: ...

    def close(self) -> object: ...


async def play_game(game: _Game, model: Model, row: Mapping[str, object], *, seed: int, num_players: int) -> Finished:
    """One game, with the reward of the seat that learns after its last reply."""
    learner, is_done = seed % num_players, False
    seen: dict[int, list[Message]] = {}
    shown: dict[int, str] = {}
    try:
        game.reset(num_players=num_players, seed=seed)
        while not is_done:
            player, observation = game.get_observation()
            seen.setdefault(player, _opening(row))
            if isinstance(observation, str):
                text = _new_part(shown.get(player, ""), observation)
                shown[player] = observation
            else:
                text = _text(observation, player)
            seen[player].append({"role": "user", "content": text})
            reply = await model.reply(seen[player], trained=player == learner)
            seen[player].append(reply.message)
            is_done, _ = game.step(reply.text)
    except EpisodeOver as over:
        _abandon(game)
        return Finished([0.0] * model.num_replies, {"over": str(over)})
    except BaseException:
        _abandon(game)
        raise
    answer = game.close()
    rewards, info = answer if isinstance(answer, tuple) else (answer, {})
    reward = rewards.get(learner) if isinstance(rewards, Mapping) else rewards
    if not isinstance(reward, Real):
        raise EpisodeError(f"the game returned the reward {reward!r}.", remedy="It has failed: see its own messages.")
    own = info.get(learner) if isinstance(info, Mapping) else None
    known = own if isinstance(own, Mapping) else {}
    return Finished([*[0.0] * (model.num_replies - 1), float(reward)], {"seat": learner, **known})


def _abandon(game: _Game) -> None:
    """Closes a game that is not done; it may fail to say who has won."""
    with suppress(Exception):
        game.close()


def _opening(row: Mapping[str, object]) -> list[Message]:
    """The system messages of the row; the game replaces the rest of its prompt."""
    prompt = row["prompt"]
    return [message for message in prompt if message["role"] == "system"] if isinstance(prompt, list) else []


def _text(observation: object, player: int) -> str:
    """The new messages, without the player's own, as text; each is a tuple of sender (-1: the game), text and type."""
    assert isinstance(observation, list), f"an observation of type {type(observation)}"
    return "\n".join(
        text if sender == -1 else f"[Player {sender}] {text}" for sender, text, *_ in observation if sender != player
    )


def _new_part(before: str, text: str) -> str:
    """The text without the previous one, if it begins with that one and is longer, as in games with a wrapper."""
    return text[len(before) :].lstrip("\n") if before and text != before and text.startswith(before) else text


def _recognizes(methods: Methods) -> bool:
    return {"reset", "get_observation", "step"} <= set(methods)


def _adapted(make: Make) -> Callable[..., object]:
    async def episode(
        model: Model, row: Mapping[str, object], seed: int, *, num_players: int = 1, **settings: object
    ) -> Finished:
        game: _Game = make(**settings)  # pyright: ignore[reportAssignmentType]
        return await play_game(game, model, row, seed=seed, num_players=num_players)

    return episode


TEXTARENA = Adapter("a game of TextArena", _recognizes, _adapted, is_coroutine=True, own_settings=("num_players",))
