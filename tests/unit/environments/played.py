"""Episodes with known replies, of environments of other systems."""

import asyncio
import json
from pathlib import Path

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.environments.episodes import run_episode
from hybridflow.environments.interface import Ask, Finished, Model, Over, Reply, Start
from hybridflow.environments.loading import load_environment
from hybridflow.environments.tool_calls import hermes_calls

FOREIGN = Path(__file__).with_name("foreign_environments.py")


class Played:
    """An episode with known replies: what was asked, and how it ended."""

    def __init__(self, name: str, replies: list[str], *, seed: int = 0, prompt: object = None, **row: object) -> None:
        settings = row.pop("settings", {})
        own = f"{FOREIGN}:{name}" if ":" not in name and "." not in name else name
        config = EnvironmentSettings(name=own, settings=dict(settings))
        self.asked: list[Ask] = []
        left = iter(replies)

        async def exchange(ask: Ask) -> Reply | Over:
            self.asked.append(Ask([*ask.messages], ask.tools, ask.is_trained))
            text = next(left, None)
            if text is None:
                return Over("max_turns")
            return Reply(text, {"role": "assistant", "content": text}, hermes_calls(text) if ask.tools else [])

        row["prompt"] = prompt or [{"role": "user", "content": "Begin."}]
        self.ended = asyncio.run(run_episode(load_environment(config), config, Start(row, seed), Model(exchange)))

    @property
    def finished(self) -> Finished:
        assert isinstance(self.ended, Finished), self.ended
        return self.ended

    @property
    def last_shown(self) -> list[str]:
        """The text of the last message of each turn."""
        return [str(ask.messages[-1]["content"]) for ask in self.asked]

    def shown(self, turn: int) -> list[str]:
        """The texts of the messages of a turn."""
        return [str(message["content"]) for message in self.asked[turn].messages]


def call(name: str, **arguments: object) -> str:
    """The text of a reply that calls a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
