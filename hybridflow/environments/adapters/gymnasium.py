"""Text environments with the interface of Gymnasium and GEM.

`reset(seed=...)` returns (observation, info), and `step(action)` (observation, reward, terminated, truncated, info).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Methods, accepted, methods_of, wrapped_by
from hybridflow.environments.interface import awaited


class _Gym(Protocol):
    def reset(self, **named: object) -> object: ...

    def step(self, action: str) -> object: ...

    def close(self) -> object: ...


class GymnasiumEnvironment:
    """The first observation replaces the prompt of the row."""

    def __init__(self, make: Callable[..., _Gym], settings: Mapping[str, object]) -> None:
        self._env = make(**settings)

    async def reset(self, row: Mapping[str, object], *, seed: int) -> object:
        """Starts an episode; the row is not used."""
        answer = await awaited(self._env.reset(**accepted(self._env.reset, {"seed": seed})))
        return answer[0] if isinstance(answer, tuple) and answer else answer

    async def step(self, action: str) -> object:
        """Passes the reply on."""
        return await awaited(self._env.step(action))

    async def close(self) -> None:
        """Closes it."""
        if "close" in methods_of(type(self._env)):
            await awaited(self._env.close())


def _recognizes(methods: Methods) -> bool:
    if not {"reset", "step"} <= set(methods):
        return False
    parameters = [*inspect.signature(methods["reset"]).parameters.values()][1:]
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return {parameter.name for parameter in named} <= {"seed", "options"}


GYMNASIUM = Adapter("an environment in the form of Gymnasium or GEM", _recognizes, wrapped_by(GymnasiumEnvironment))
