"""The settings of reward functions, `reward.settings.<function>.<name>`, checked against the parameters they set."""

import inspect
import types
from collections.abc import Callable, Collection, Mapping
from typing import Union, get_args, get_origin, get_type_hints

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

_PLAIN = (bool, int, float, str, list, dict, type(None))


def checked_settings(
    function: Callable[..., object], given: object, *, key: str, names: Collection[str]
) -> dict[str, object]:
    """The given settings of a function or class, if each name is among `names` and its annotation allows its value.

    Otherwise raises `ConfigError`; `key` is `reward.settings.<function>`.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given!r} must be a mapping.", remedy=f"{_known(key, names)} Write {key}.name=value.")
    kinds = _kinds(function)
    for name, value in given.items():
        if name not in names:
            raise ConfigError(
                f"There is no setting '{key}.{name}'.", remedy=f"{did_you_mean(name, names)}{_known(key, names)}"
            )
        wanted = kinds.get(name, ())
        if wanted and not any(_is_of(value, kind) for kind in wanted):
            raise ConfigError(
                f"{key}.{name}={value!r} is a {type(value).__name__}.",
                remedy=f"Give {' or '.join('null' if kind is type(None) else kind.__name__ for kind in wanted)}.",
            )
    return {str(name): value for name, value in given.items()}


def _known(key: str, names: Collection[str]) -> str:
    return f"Settings of {key.rpartition('.')[2]}: {', '.join(names) or 'none'}."


def _kinds(function: Callable[..., object]) -> dict[str, tuple[type, ...]]:
    """The plain types that each parameter's annotation allows, without parameters that have other annotations."""
    called = function.__init__ if inspect.isclass(function) else type(function).__call__
    try:
        hints = get_type_hints(function if inspect.isroutine(function) else called)
    except (NameError, TypeError, AttributeError):  # annotations of user code may not be resolvable
        return {}
    found = {}
    for name, hint in hints.items():
        choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        plain = tuple(get_origin(choice) or choice for choice in choices)
        if all(kind in _PLAIN for kind in plain):
            found[name] = plain
    return found


def _is_of(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)
