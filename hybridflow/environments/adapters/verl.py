"""Tools of verl: classes with `create`, `execute`, `calc_reward` and `release`, all coroutine functions.

`environment.settings` has `config` and `tool_schema`, as verl's file of tools. The columns `tools_kwargs` or
`extra_info.tools_kwargs` give keyword arguments of `create` and `execute`. A reply without a call ends the episode.
"""

import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from hybridflow.environments.adapters.interface import Adapter, Methods, methods_of, wrapped_by
from hybridflow.environments.tools import CallableTool, ToolAnswer


class _Tool(Protocol):
    tool_schema: object

    def create(self, instance_id: str | None = None, **named: object) -> Awaitable[tuple[str, object]]: ...

    def execute(self, instance_id: str, parameters: dict, **named: object) -> Awaitable[tuple[object, float, dict]]: ...

    def calc_reward(self, instance_id: str, **named: object) -> Awaitable[float]: ...

    def release(self, instance_id: str, **named: object) -> Awaitable[None]: ...


class VerlToolEnvironment:
    """Rewards each call with what `execute` returns, and the end with `calc_reward`."""

    def __init__(self, make: Callable[..., _Tool], settings: Mapping[str, object]) -> None:
        given = settings.get("tool_schema")
        self._tool = make(settings.get("config") or {}, _schema_object(given))
        schema = self._tool.tool_schema
        plain = dict(schema) if isinstance(schema, Mapping) else _dumped(schema)
        self.tools = [CallableTool(plain, self._execute)]
        self._name = self.tools[0].name
        self._instance = ""
        self._keywords: dict[str, dict[str, object]] = {}

    async def reset(self, row: Mapping[str, object], *, seed: int) -> None:
        """Creates an instance of the tool; the prompt is that of the row."""
        extra = row.get("extra_info")
        found = row.get("tools_kwargs") or (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None) or {}
        assert isinstance(found, Mapping), f"tools_kwargs of type {type(found)}"
        self._keywords = found.get(self._name) or {}
        self._instance, *_ = await self._tool.create(None, **(self._keywords.get("create_kwargs") or {}))

    async def _execute(self, arguments: dict) -> ToolAnswer:
        keywords = self._keywords.get("execute_kwargs") or {}
        response, reward, _ = await self._tool.execute(self._instance, arguments, **keywords)
        text = response if isinstance(response, str) else vars(response)["text"]
        return ToolAnswer(text or "", float(reward or 0.0))

    async def step(self, action: str) -> tuple[str, float, bool, dict]:
        """A reply without a call: the end, with the reward."""
        return "", await self.over(), True, {}

    async def over(self) -> float:
        """The reward of the state that the calls have reached."""
        return float(await self._tool.calc_reward(self._instance) or 0.0)

    async def close(self) -> None:
        """Releases the instance."""
        if self._instance:
            await self._tool.release(self._instance)


def _dumped(schema: object) -> dict[str, object]:
    """A schema of verl's class, which is a pydantic model, as a dictionary."""
    return methods_of(type(schema))["model_dump"](schema, exclude_unset=True, exclude_none=True)  # pyright: ignore[reportReturnType]


def _schema_object(given: object) -> object:
    """The schema as verl's own class, which verl itself has imported if the tool is based on its `BaseTool`."""
    module = sys.modules.get("verl.tools.schemas")
    if module is None or not isinstance(given, Mapping):
        return given
    return vars(module)["OpenAIFunctionToolSchema"].model_validate(dict(given))


def _recognizes(methods: Methods) -> bool:
    return {"create", "execute", "release"} <= set(methods)


VERL_TOOL = Adapter("a tool of verl (BaseTool)", _recognizes, wrapped_by(VerlToolEnvironment))
