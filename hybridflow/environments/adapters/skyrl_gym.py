"""Environments of SkyRL-Gym: `init(prompt)` returns (messages, info), and `step(action)` a dictionary.

The class is called with `env_config`, which is `environment.settings`, and `extras`, which is the row of the data.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Methods, accepted, methods_of, wrapped_by
from hybridflow.environments.interface import awaited
from hybridflow.errors import EpisodeError

_KEYS = ("observations", "reward", "done")


class _Sky(Protocol):
    def init(self, prompt: object) -> object: ...

    def step(self, action: str) -> object: ...

    def close(self) -> object: ...


class SkyRLEnvironment:
    """Makes the environment in `reset`, because it is made with a row."""

    def __init__(self, make: Callable[..., _Sky], settings: Mapping[str, object]) -> None:
        self._make, self._settings = make, dict(settings)
        self._env: _Sky | None = None

    async def reset(self, row: Mapping[str, object], *, seed: int) -> object:
        """Makes and starts the environment; its first messages replace the prompt of the row."""
        self._env = self._make(**accepted(self._make, {"env_config": self._settings, "extras": dict(row)}))
        answer = await awaited(self._env.init(row["prompt"]))
        return answer[0] if isinstance(answer, tuple) and answer else answer

    async def step(self, action: str) -> object:
        """Passes the reply on."""
        assert self._env is not None, "a step before reset"
        answer = await awaited(self._env.step(action))
        if not isinstance(answer, Mapping) or not all(key in answer for key in _KEYS):
            raise EpisodeError(
                f"its method 'step' returned {str(answer)[:60]}, not a dictionary.",
                remedy="Return BaseTextEnvStepOutput(observations=..., reward=..., done=..., metadata={}).",
            )
        return answer["observations"], answer["reward"], answer["done"], dict(answer.get("metadata") or {})

    async def close(self) -> None:
        """Closes it."""
        if self._env is not None and "close" in methods_of(type(self._env)):
            await awaited(self._env.close())


def _recognizes(methods: Methods) -> bool:
    return {"init", "step"} <= set(methods) and "reset" not in methods


SKYRL_GYM = Adapter("an environment of SkyRL-Gym", _recognizes, wrapped_by(SkyRLEnvironment))
