"""Classes for TRL's `environment_factory`: `reset(**row)` returns text or None, other public methods are tools.

`get_reward()`, if there is one, returns the reward of the episode. A reply without a call ends the episode.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Methods, accepted, methods_of, wrapped_by
from hybridflow.environments.interface import Message, Observation, awaited
from hybridflow.environments.tools import function_tool
from hybridflow.errors import EpisodeError

_NO_TOOLS = ("reset", "get_reward")


class _Trl(Protocol):
    def reset(self, **row: object) -> object: ...

    def get_reward(self) -> object: ...


class TRLEnvironment:
    """Appends the text of `reset` to the last message of the prompt, as TRL does."""

    def __init__(self, make: Callable[..., _Trl], settings: Mapping[str, object]) -> None:
        self._env = make(**settings)
        self._methods = methods_of(type(self._env))
        names = [name for name in self._methods if name not in _NO_TOOLS and not name.startswith("_")]
        self.tools = [function_tool(getattr(self._env, name)) for name in names]

    async def reset(self, row: Mapping[str, object], *, seed: int) -> Observation:
        """Starts an episode of the row."""
        text = await awaited(self._env.reset(**accepted(self._env.reset, row)))
        if text is None:
            return None
        if not isinstance(text, str):
            raise EpisodeError(
                f"its method 'reset' returned {repr(text)[:60]} of type {type(text).__name__}, not text or None.",
                remedy="Return the text that follows the prompt of the row.",
            )
        prompt = row["prompt"]
        if isinstance(prompt, list):
            last: Message = prompt[-1]
            return [*prompt[:-1], {**last, "content": f"{last['content']}{text}"}]
        return f"{prompt}{text}"

    async def step(self, action: str) -> tuple[str, object, bool, dict]:
        """A reply without a call: the end, with the reward."""
        return "", await self.over(), True, {}

    async def over(self) -> object:
        """The reward of the episode; 0 if other functions score it."""
        return await awaited(self._env.get_reward()) if "get_reward" in self._methods else 0.0


def _recognizes(methods: Methods) -> bool:
    if "reset" not in methods:
        return False
    parameters = [*inspect.signature(methods["reset"]).parameters.values()][1:]
    takes_columns = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if "step" in methods:
        is_tool = inspect.signature(methods["step"]).return_annotation is str
        return takes_columns and (is_tool or "get_reward" in methods)
    has_tools = any(name not in _NO_TOOLS and not name.startswith("_") for name in methods)
    return takes_columns and has_tools


TRL = Adapter("an environment of TRL (environment_factory)", _recognizes, wrapped_by(TRLEnvironment))
