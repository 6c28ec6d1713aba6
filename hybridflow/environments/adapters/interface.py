"""The form of an adapter, and the methods of a class that adapters read."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Methods = Mapping[str, Callable[..., object]]
"""The functions of a class and its base classes by name."""

Make = Callable[..., object]
"""A class, or a function that returns an object of it."""


@dataclass(frozen=True)
class Adapter:
    """How the environments of another system are recognized and run.

    `adapted` is given a class, or a function that returns its objects. It returns a function of `environment.settings`
    that makes an environment or, with `is_coroutine`, a coroutine function of (model, row, seed) and the settings.
    """

    kind: str
    recognizes: Callable[[Methods], bool]
    adapted: Callable[[Make], Callable[..., object]]
    is_coroutine: bool = False
    needs_info: bool = False
    """Its episodes use `Model.info`."""

    own_settings: tuple[str, ...] = ()
    """Names in `environment.settings` that the adapter reads itself, and does not pass to the environment."""


def wrapped_by(environment: Callable[..., object]) -> Callable[[Make], Callable[..., object]]:
    """The `adapted` of an adapter whose environments are `environment(make, settings)`."""
    return lambda make: lambda **settings: environment(make, settings)


def methods_of(kind: type) -> Methods:
    """The functions among the attributes of a class and its base classes."""
    found = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def accepted(function: Callable[..., object], named: Mapping[str, object]) -> dict[str, object]:
    """Those of the named values that a function has a parameter for; all of them if it takes any."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in named.items() if takes_all or name in parameters}
