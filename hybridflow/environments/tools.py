"""Tools: typed Python functions whose schemas the chat template shows, and which the model calls."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.user_code import described
from hybridflow.environments.interface import Message, Tool
from hybridflow.errors import ConfigError, EpisodeError

_MOST_CHARACTERS = 4_000
"""Maximum length of a tool's answer; the rest is cut off."""


class Toolbox:
    """The tools of an episode. Mistakes of the model are answered with a message that explains them."""

    def __init__(self, functions: Mapping[str, Callable[..., object]]) -> None:
        self._functions = functions
        self.schemas: list[Tool] = [tool_schema(function) for function in functions.values()]
        """JSON schemas, in the form that chat templates expect."""

    @staticmethod
    def of(declared: object, owner: object) -> "Toolbox":
        """The functions in an environment's `tools`; those that are methods of its class are bound to it."""
        if not isinstance(declared, Sequence) or not all(map(callable, declared)):
            raise ConfigError(
                f"tools={str(declared)[:80]} is not a list of functions.", remedy="Write tools = [function, ...]."
            )
        own = vars(type(owner)).values()
        bound = [tool.__get__(owner) if inspect.isfunction(tool) and tool in own else tool for tool in declared]
        return Toolbox({tool.__name__: tool for tool in bound})

    def answers(self, calls: Sequence[Mapping[str, object]]) -> list[Message]:
        """One message per call: the tool's answer, or what was wrong with the call."""
        return [{"role": "tool", "content": self._answer(call)[:_MOST_CHARACTERS]} for call in calls]

    def _answer(self, call: Mapping[str, object]) -> str:
        if "error" in call:
            return f"Error: {call['error']}"
        name, arguments = str(call["name"]), call["arguments"]
        if name not in self._functions:
            known = ", ".join(self._functions) or "none"
            return f"Error: there is no tool '{name}'. {did_you_mean(name, self._functions)}Tools: {known}."
        function = self._functions[name]
        if not isinstance(arguments, dict):
            return f"Error: the arguments of {name} must be an object."
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"Error: {name}{inspect.signature(function)} cannot be called with these arguments: {error}."
        wrong = _wrong_types(function, arguments)
        if wrong:
            return f"Error: {name}: {wrong}."
        try:
            return _result(function, arguments)
        except EpisodeError as error:
            return error.message


def _result(function: Callable[..., object], arguments: Mapping[str, object]) -> str:
    """The result as text. Raises `EpisodeError` for what the function raises, except an `OSError`.

    The model may have asked for something impossible, and can react to the reason.
    """
    try:
        return str(function(**arguments))
    except OSError:
        raise
    except Exception as error:
        raise EpisodeError(f"Error: {described(error, callers={__file__})}", remedy="Call it differently.") from error


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
