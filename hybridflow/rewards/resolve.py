"""What the user wrote in `reward.functions` becomes functions: built-in names, dotted paths, files."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.dialects import DIALECTS, dialect_of
from hybridflow.rewards.factory import BUILT_IN
from hybridflow.rewards.signatures import parameters_of
from hybridflow.rewards.tracing import described


def resolve_functions(config: Reward) -> list[BoundReward]:
    """The functions of `reward.functions`, each with the dialect it is written in.

    Whatever would keep one from being called is a `ConfigError` here, before anything starts.
    """
    if not config.functions:
        raise ConfigError("reward.functions is empty.", remedy=f"Name at least one, such as {next(iter(BUILT_IN))}.")
    modules: dict[Path, ModuleType] = {}
    found: list[BoundReward] = []
    for setting in config.functions:
        label = _unused(_label(setting), [reward.label for reward in found])
        found.append(_bound(setting, label, _function(setting, config, modules)))
    return found


def _bound(setting: str, label: str, function: Callable[..., object]) -> BoundReward:
    parameters = parameters_of(function)
    dialect = dialect_of(parameters) if parameters is not None else None
    if parameters is None or dialect is None:
        known = "\n  ".join(f"{each.signature}   ({each.name})" for each in DIALECTS)
        raise ConfigError(
            f"reward.functions: the parameters of '{setting}', {_signature(function)}, are those of no known kind.",
            remedy=f"Give it one of these signatures:\n  {known}",
        )
    return BoundReward(setting, label, function, parameters, dialect)


def _function(setting: str, config: Reward, modules: dict[Path, ModuleType]) -> Callable[..., object]:
    if setting in BUILT_IN:
        return BUILT_IN[setting](config)
    path, colon, name = setting.rpartition(":")
    if colon and path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        if file not in modules:
            modules[file] = _module_of_file(file, setting)
        return _member(modules[file], name, setting)
    if setting.endswith(".py"):
        raise ConfigError(f"reward.functions: '{setting}' names no function.", remedy=f"Write {setting}:function.")
    module, dot, name = setting.rpartition(".")
    if not dot:
        raise ConfigError(
            f"reward.functions: there is no built-in function '{setting}'.",
            remedy=f"{did_you_mean(setting, BUILT_IN)}Built in are: {', '.join(BUILT_IN)}. Your own are named "
            "my_package.rewards.f or path/reward.py:f.",
        )
    return _member(_module(module, setting), name, setting)


def _module(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f"reward.functions: the module of '{setting}' cannot be imported: {described(error)}.",
            remedy="Check the name, and that its package is installed or in the current directory.",
        ) from error


def _module_of_file(file: Path, setting: str) -> ModuleType:
    if not file.is_file():
        others = sorted(found.name for found in file.parent.glob("*.py")) if file.parent.is_dir() else []
        hint = did_you_mean(file.name, others) or (f"'{file.parent}' has: {', '.join(others[:8])}. " if others else "")
        raise ConfigError(f"reward.functions: '{setting}': there is no file '{file}'.", remedy=f"{hint}Check the path.")
    name = f"hybridflow_reward_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"no import machinery for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"reward.functions: the file of '{setting}' cannot be run: {described(error)}.", remedy="Mend the file."
        ) from error
    return module


def _member(module: ModuleType, name: str, setting: str) -> Callable[..., object]:
    """The function of that name; a class is taken as an object with `__call__`, made without arguments."""
    if name not in vars(module):
        raise ConfigError(
            f"reward.functions: '{setting}': there is no '{name}' in it.",
            remedy=f"{did_you_mean(name, vars(module))}{_listed(_own_functions(module))}",
        )
    member = vars(module)[name]
    if inspect.isclass(member):
        try:
            member = member()
        except Exception as error:
            raise ConfigError(
                f"reward.functions: the class '{setting}' cannot be made without arguments: {described(error)}.",
                remedy="Name a function that makes one and calls it.",
            ) from error
    if not callable(member):
        raise ConfigError(
            f"reward.functions: '{setting}' is a {type(member).__name__}, not a function.",
            remedy=_listed(_own_functions(module)),
        )
    return member


def _own_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _listed(functions: Iterable[str]) -> str:
    names = ", ".join(functions)
    return f"Its functions are: {names}." if names else "It has no functions of its own."


def _label(setting: str) -> str:
    return setting.rpartition(":")[2].rpartition(".")[2]


def _unused(label: str, taken: list[str]) -> str:
    candidates = [label, *(f"{label}_{number}" for number in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def _signature(function: Callable[..., object]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "which Python cannot tell"
