"""Loads the class or coroutine that `environment` names, and checks what can be known of it before an episode."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.user_code import described, ending_forks, load_member, named_parameters
from hybridflow.environments.adapters.factory import OWN_SETTINGS, adapter_of
from hybridflow.environments.adapters.interface import Adapter, methods_of
from hybridflow.environments.built_in.factory import BUILT_IN
from hybridflow.environments.built_in.tools import Tools
from hybridflow.environments.program import check_program, play_program
from hybridflow.environments.tools import Toolbox
from hybridflow.errors import ConfigError

_METHODS = {
    "reset": "def reset(self, row, *, seed): return 'the first prompt'",
    "step": "def step(self, action): return observation, reward, done, info",
}


@dataclass(frozen=True)
class LoadedEnvironment:
    """The code that runs an episode: a class with `reset` and `step`, or a coroutine function of (model, row)."""

    make: Callable[..., object]
    is_coroutine: bool
    takes_seed: bool
    is_trusted: bool
    """It is built in, so it is fast and cannot crash."""

    needs_info: bool = False
    """Its episodes use `Model.info`."""

    gives_rewards: bool = True
    """False for tools alone: other functions score its episodes."""

    kind: str | None = None
    """For the log: the system whose interface was recognized, or tools; None for environments of hybridflow."""


def load_environment(config: EnvironmentSettings) -> LoadedEnvironment:
    """The environment of the configuration. Raises `ConfigError` if it cannot run an episode."""
    if config.program is not None:
        if config.name is not None:
            raise ConfigError(
                f"environment={config.name} and environment.program={config.program} are both set.",
                remedy="Leave one of them out.",
            )
        check_program(config)
        make = partial(play_program, program=config.program)
        return LoadedEnvironment(make, is_coroutine=True, takes_seed=True, is_trusted=False)
    name = str(config.name)
    if "." not in name and name not in BUILT_IN:
        raise ConfigError(
            f"environment={name}: there is no built-in environment of this name.",
            remedy=f"{did_you_mean(name, BUILT_IN)}Built in are: {', '.join(BUILT_IN)}. Your own is named"
            " path/file.py:Class.",
        )
    found = BUILT_IN.get(name) or load_member(name, key="environment")
    is_trusted = name in BUILT_IN and not config.mcp
    if inspect.iscoroutinefunction(found):
        return _coroutine(found, config, is_trusted=is_trusted)
    if isinstance(found, list | tuple):
        return _of_tools(found, name)
    if not callable(found):
        raise ConfigError(
            f"environment: {name} is of type {type(found).__name__}, not a class or coroutine function.",
            remedy="Name a class, a coroutine function, a function that returns an environment, or a list of tools.",
        )
    kind = found if inspect.isclass(found) else _made_by(found, config)
    if adapter := adapter_of(kind):
        return _of_another_system(found, adapter, config)
    if not inspect.isclass(found):
        raise ConfigError(
            f"environment={name} is a function that returns a {kind.__name__}, not an environment that hybridflow"
            " recognizes.",
            remedy="Return an environment, or write a class with reset and step.",
        )
    _check_class(found, config)
    takes_seed = "seed" in inspect.signature(methods_of(found)["reset"]).parameters
    return LoadedEnvironment(found, is_coroutine=False, takes_seed=takes_seed, is_trusted=is_trusted)


def made(environment: LoadedEnvironment, config: EnvironmentSettings) -> object:
    """An object of the class, made with `environment.settings`. Raises `ConfigError` if that fails."""
    try:
        with ending_forks():
            return environment.make(**config.settings)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"environment={config.name} cannot be made with environment.settings={dict(config.settings)}:"
            f" {described(error, callers={__file__})}.",
            remedy="Give the class defaults for its arguments, or set them in environment.settings.",
        ) from error


def _of_tools(found: Sequence[object], name: str) -> LoadedEnvironment:
    if not found:
        raise ConfigError(f"environment={name} is an empty list.", remedy="Add typed functions with docstrings.")
    Toolbox.of(found, owner=None)
    return LoadedEnvironment(
        partial(Tools, found),
        is_coroutine=False,
        takes_seed=False,
        is_trusted=False,
        gives_rewards=False,
        kind=f"tools ({len(found)})",
    )


def _made_by(found: Callable[..., object], config: EnvironmentSettings) -> type:
    """The class of the environment that a function, such as `gem.make`, returns for `environment.settings`.

    The function need not accept settings that an adapter reads itself, such as the number of seats.
    """
    parameters = named_parameters(found)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in config.settings]
    if missing:
        raise ConfigError(
            f"environment={config.name} is a function, but not a coroutine function; environment.settings does not give"
            f" it: {', '.join(missing)}.",
            remedy="Write 'async def episode(model, row)', a class with reset and step, or a function that returns an"
            " environment.",
        )
    environment = LoadedEnvironment(found, is_coroutine=False, takes_seed=False, is_trusted=False)
    fewer = {name: value for name, value in config.settings.items() if name not in OWN_SETTINGS}
    try:
        return type(made(environment, config))
    except ConfigError as error:
        if len(fewer) == len(config.settings) or not isinstance(error.__cause__, TypeError):
            raise
        return type(made(environment, replace(config, settings=fewer)))


def _of_another_system(
    found: Callable[..., object], adapter: Adapter, config: EnvironmentSettings
) -> LoadedEnvironment:
    make = adapter.adapted(found)
    parameters = inspect.signature(make).parameters.values()
    if all(each.kind is not each.VAR_KEYWORD for each in parameters):
        _check_names(config, [each.name for each in parameters if each.kind is each.KEYWORD_ONLY])
    return LoadedEnvironment(
        make,
        adapter.is_coroutine,
        takes_seed=True,
        is_trusted=False,
        needs_info=adapter.needs_info,
        kind=adapter.kind,
    )


def _coroutine(found: Callable[..., Awaitable], config: EnvironmentSettings, *, is_trusted: bool) -> LoadedEnvironment:
    parameters = named_parameters(found)
    if [*parameters][:2] != ["model", "row"]:
        raise ConfigError(
            f"environment={config.name} has the parameters ({', '.join(parameters)}).",
            remedy="Write 'async def episode(model, row)'; it may also take seed.",
        )
    _check_names(config, [*parameters][2:])
    return LoadedEnvironment(found, is_coroutine=True, takes_seed="seed" in parameters, is_trusted=is_trusted)


def _check_class(found: type, config: EnvironmentSettings) -> None:
    functions = methods_of(found)
    for method, how in _METHODS.items():
        if method not in functions:
            raise ConfigError(
                f"environment={config.name}: {found.__name__} does not define the method '{method}'.",
                remedy=f"Write '{how}' in it.",
            )
        signature = inspect.signature(functions[method])
        named = {"seed": 0} if method == "reset" and "seed" in signature.parameters else {}
        try:
            signature.bind(None, None, **named)
        except TypeError as error:
            raise ConfigError(
                f"environment={config.name}: the method '{method}' has the parameters {signature}: {error}.",
                remedy=f"Write '{how}' in it.",
            ) from error
        if signature.return_annotation is None and method == "step":
            raise ConfigError(
                f"environment={config.name}: the method 'step' is declared to return None.", remedy=f"Write '{how}'."
            )
    if "__init__" in functions:
        _check_names(config, [*named_parameters(functions["__init__"])][1:])
    elif config.settings:
        _check_names(config, [])
    declared = inspect.getattr_static(found, "tools", None)
    is_plain = found.__new__ is object.__new__ and not inspect.isabstract(found)
    if isinstance(declared, list | tuple) and is_plain:
        Toolbox.of(declared, owner=object.__new__(found))  # without __init__: only methods are bound to it


def _check_names(config: EnvironmentSettings, known: list[str]) -> None:
    known = [name for name in known if name != "seed"]
    for name in config.settings:
        if name not in known:
            raise ConfigError(
                f"environment={config.name} has no setting '{name}'.",
                remedy=f"{did_you_mean(name, known)}Its settings: {', '.join(known) or 'none'}.",
            )
