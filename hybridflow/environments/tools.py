"""Tools that the model calls: typed Python functions, and tools of other systems with a JSON schema."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.user_code import described
from hybridflow.environments.interface import Message, Tool
from hybridflow.environments.messages import call_id
from hybridflow.errors import ConfigError, EpisodeError

_MOST_CHARACTERS = 4_000
"""Maximum length of a tool's answer; the rest is cut off."""


@dataclass(frozen=True)
class ToolAnswer:
    """The answer of a tool, and the reward of the call."""

    text: str
    reward: float = 0.0


@dataclass(frozen=True)
class CallableTool:
    """A tool with its JSON schema, in the form that chat templates expect.

    `call` gets the arguments of a call, and returns the answer (`ToolAnswer`, or anything with a text) or an awaitable
    of it. It raises `EpisodeError` for arguments that do not fit.
    """

    schema: Tool
    call: Callable[[dict], object]

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        function = self.schema["function"]
        assert isinstance(function, Mapping), f"the schema of a tool: {self.schema}"
        return str(function["name"])


class Toolbox:
    """The tools of an episode. Mistakes of the model are answered with a message that explains them."""

    def __init__(self, tools: Sequence[CallableTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self.schemas: list[Tool] = [tool.schema for tool in self._tools.values()]
        """JSON schemas, in the form that chat templates expect."""

    @staticmethod
    def of(declared: object, owner: object, further: Sequence[CallableTool] = ()) -> "Toolbox":
        """The tools in an environment's `tools`, whose functions are bound to it if they are methods, and others.

        Raises `ConfigError` if two of them have the same name.
        """
        if not isinstance(declared, Sequence) or not all(map(_is_tool, declared)):
            raise ConfigError(
                f"tools={str(declared)[:80]} is not a list of functions.", remedy="Write tools = [function, ...]."
            )
        tools = [tool if isinstance(tool, CallableTool) else function_tool(_bound(tool, owner)) for tool in declared]
        names = [tool.name for tool in (*tools, *further)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"Two tools of the environment are named '{twice}'.", remedy="Rename one of them.")
        return Toolbox([*tools, *further])

    async def answers(self, calls: Sequence[Mapping[str, object]]) -> tuple[list[Message], float]:
        """One message per call, with the tool's answer or what was wrong with the call; and the reward of the calls."""
        found = [await self._answer(call) for call in calls]
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.get("id", call_id(index)), "content": answer.text[:_MOST_CHARACTERS]}
            for index, (call, answer) in enumerate(zip(calls, found, strict=True))
        ]
        return messages, sum(answer.reward for answer in found)

    async def _answer(self, call: Mapping[str, object]) -> ToolAnswer:
        if "error" in call:
            return ToolAnswer(f"Error: {call['error']}")
        name, arguments = str(call["name"]), call["arguments"]
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return ToolAnswer(f"Error: there is no tool '{name}'. {did_you_mean(name, self._tools)}Tools: {known}.")
        if not isinstance(arguments, dict):
            return ToolAnswer(f"Error: the arguments of {name} must be a JSON object.")
        try:
            answer = await _result(self._tools[name], arguments)
        except EpisodeError as error:
            return ToolAnswer(error.message)
        return answer if isinstance(answer, ToolAnswer) else ToolAnswer(str(answer))


def _is_tool(tool: object) -> bool:
    return isinstance(tool, CallableTool) or inspect.isroutine(tool)


def _bound(tool: Callable[..., object], owner: object) -> Callable[..., object]:
    """A function that the class of `owner`, or a base class, defines: as the method of this name, which a subclass may
    override. Any other function is returned as it is."""
    for base in type(owner).__mro__:
        for name, value in vars(base).items():
            if value is tool:
                return getattr(owner, name)
    return tool


async def _result(tool: CallableTool, arguments: dict) -> object:
    """The answer of a tool. Raises `EpisodeError` for what the tool raises, except an `OSError`.

    The model may have asked for something impossible, and can react to the reason.
    """
    try:
        answer = tool.call(arguments)
        return await answer if isinstance(answer, Awaitable) else answer
    except (OSError, EpisodeError):
        raise
    except Exception as error:
        raise EpisodeError(f"Error: {described(error, callers={__file__})}", remedy="Call it differently.") from error


def function_tool(function: Callable[..., object]) -> CallableTool:
    """A typed function with a docstring as a tool. Raises `ConfigError` if it lacks types or descriptions."""
    schema = tool_schema(function)
    name = function.__name__

    def call(arguments: dict) -> object:
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            shown = f"{name}{inspect.signature(function)}"
            raise EpisodeError(
                f"Error: {shown} cannot be called with these arguments: {error}.", remedy="Call it differently."
            ) from error
        if wrong := _wrong_types(function, arguments):
            raise EpisodeError(f"Error: {name}: {wrong}.", remedy="Call it differently.")
        return function(**arguments)

    return CallableTool(schema, call)


def tool_schema(function: Callable[..., object]) -> Tool:
    """The JSON schema of a typed function with a docstring. Raises `ConfigError` if it lacks types or descriptions."""
    try:
        return get_json_schema(function)
    except Exception as error:  # DocstringParsingException and TypeHintParsingException have no common base class
        raise ConfigError(
            f"The tool '{function.__name__}' cannot be described to the model: {error}",
            remedy="Give it a docstring with a description, an 'Args:' section that describes each argument, and a"
            " type for each argument.",
        ) from error


def _wrong_types(function: Callable[..., object], arguments: Mapping[str, object]) -> str:
    """The first argument whose value is not of its annotated plain type; empty if there is none."""
    hints = get_type_hints(function)
    for name, value in arguments.items():
        hint = hints.get(name)
        kinds = (int, float) if hint is float else (hint,) if hint in (int, str, bool, list, dict) else ()
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool)):
            return f"{name}={value!r} is not of type {hint.__name__ if isinstance(hint, type) else hint}"
    return ""
