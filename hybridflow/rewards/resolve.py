"""Turns the entries of `reward.functions` into functions: built-in names, dotted paths, files, and addresses."""

import functools
import inspect
import logging
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints

from hybridflow.config.nearest import did_you_mean, known_settings
from hybridflow.config.reward import Reward
from hybridflow.config.user_code import ending_forks, load_member
from hybridflow.errors import STRICT, ConfigError, Problems, raised_together
from hybridflow.observability.redaction import redacted_text
from hybridflow.rewards.bound import BoundReward, described
from hybridflow.rewards.dialects import (
    DIALECTS,
    Dialect,
    Function,
    Parameters,
    dialect_named,
    dialect_of,
    fits,
    parameters_of,
)
from hybridflow.rewards.factory import BUILT_IN
from hybridflow.rewards.remote import RemoteReward, address_label, is_address

logger = logging.getLogger(__name__)

_KEY = "reward.functions"
_PLAIN = (bool, int, float, str, list, dict, type(None))


def resolve_functions(config: Reward, problems: Problems = STRICT) -> list[BoundReward]:
    """The functions of `reward.functions`, with their dialects; adds a `ConfigError` for each that cannot be called."""
    if not config.functions:
        raise ConfigError(
            "reward.functions is empty.",
            remedy=f"Name at least one, such as {next(iter(BUILT_IN))}, or a reward model: reward.model.path=...",
        )
    resolved = []
    for setting, label in zip(config.functions, labels_of(config), strict=True):
        with problems.caught():
            resolved.append(_resolved(setting, label, config.settings.get(label, {})))
    return resolved


def labels_of(config: Reward) -> list[str]:
    """The short name of each function in metrics, columns and `reward.settings`."""
    labels: list[str] = []
    for setting in config.functions:
        label = address_label(setting) if is_address(setting) else setting.rpartition(":")[2].rpartition(".")[2]
        candidates = [label, *(f"{label}_{number}" for number in range(2, len(labels) + 3))]
        labels.append(next(candidate for candidate in candidates if candidate not in labels))
    return labels


def check_settings(rewards: Sequence[Reward], problems: Problems = STRICT) -> None:
    """Adds a `ConfigError` for `reward.settings` of a function that the run does not use and that is not built in."""
    labels = [label for reward in rewards for label in labels_of(reward)]
    for name in dict.fromkeys(name for reward in rewards for name in reward.settings):
        if name in labels:
            continue
        if name not in BUILT_IN:
            unknown = f"reward.settings.{name}: no function of the run is called '{name}'."
            hint = did_you_mean(name, [*labels, *BUILT_IN])
            remedy = f"{hint}Functions: {', '.join(labels)}." if labels else "Leave it out: the run has no functions."
            problems.add(ConfigError(unknown, remedy=remedy))
            continue
        logger.warning("reward.settings.%s has no effect: reward.functions does not name it", name)


def _resolved(setting: str, label: str, given: object) -> BoundReward:
    def settings(function: Function, names: Collection[str]) -> Mapping[str, Any]:
        return _checked_settings(function, given, key=f"reward.settings.{label}", names=names)

    if is_address(setting):
        remote = RemoteReward(setting, **settings(RemoteReward, list(inspect.signature(RemoteReward).parameters)[1:]))
        return _bound(redacted_text(setting), label, remote, dialect_named("openrlhf"), is_trusted=True)
    if setting in BUILT_IN:
        entry = BUILT_IN[setting]
        function = entry.make(**settings(entry.make, inspect.signature(entry.make).parameters))
        return _bound(setting, label, function, None, is_trusted=entry.is_trusted)
    prefix, colon, rest = setting.partition(":")
    dialect = dialect_named(prefix.lower()) if colon else None
    function = _user_function(rest if dialect else setting, setting)
    parameters = parameters_of(function)
    kind = dialect or (dialect_of(parameters) if parameters is not None else None)
    own = [name for name in parameters.named if kind is None or name not in kind.offers] if parameters else []
    return _bound(setting, label, function, kind, settings(function, own))


def _bound(
    setting: str,
    label: str,
    function: Function,
    dialect: Dialect | None,
    settings: Mapping[str, object] | None = None,
    *,
    is_trusted: bool = False,
) -> BoundReward:
    parameters = parameters_of(function)
    if parameters is not None:
        parameters = parameters.without(settings or {})
        dialect = dialect or dialect_of(parameters)
    if parameters is None or dialect is None or not fits(dialect, parameters):
        raise _unknown_signature(setting, function, dialect, parameters)
    called = functools.partial(function, **settings) if settings else function
    return BoundReward(setting, label, called, parameters, dialect, is_trusted)


def _unknown_signature(
    setting: str, function: Function, dialect: Dialect | None, parameters: Parameters | None
) -> ConfigError:
    kinds = DIALECTS if dialect is None else (dialect,)
    known = "\n  ".join(f"{each.signature}   ({each.name})" for each in kinds)
    flaw = (
        "match no known signature" if dialect is None or parameters is None else f"do not match that of {dialect.name}"
    )
    try:
        signature = str(inspect.signature(function))
    except (TypeError, ValueError):
        signature = "which Python cannot determine"
    return ConfigError(
        f"{_KEY}: the parameters of '{setting}', {signature}, {flaw}.",
        remedy=f"Give it one of these signatures:\n  {known}",
    )


def _user_function(path: str, setting: str) -> Function:
    """The function at a path; a class is instantiated without arguments and must have `__call__`."""
    if not path.endswith(".py") and "." not in path:
        raise ConfigError(
            f"{_KEY}: there is no built-in function '{path}'.",
            remedy=f"{did_you_mean(path, BUILT_IN)}Built in are: {', '.join(BUILT_IN)}. Your own are named "
            "my_package.rewards.f or path/reward.py:f.",
        )
    member = load_member(path, key=_KEY)
    if inspect.isclass(member):
        try:
            with ending_forks():
                member = member()
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{_KEY}: the class '{setting}' cannot be instantiated without arguments: {described(error)}.",
                remedy="Name a function that makes one and calls it.",
            ) from error
    if not callable(member):
        raise ConfigError(
            f"{_KEY}: '{setting}' is of type {type(member).__name__}, not a function.", remedy="Name a function."
        )
    return member


def _checked_settings(function: Function, given: object, *, key: str, names: Collection[str]) -> dict[str, object]:
    """The given settings of a function or class, if each name is among `names` and its annotation allows its value.

    Otherwise raises `ConfigError`; `key` is `reward.settings.<function>`.
    """
    known = known_settings(key.rpartition(".")[2], names)
    if not isinstance(given, Mapping):
        how = f" Write {key}.name=value." if names else ""
        raise ConfigError(f"{key}={given!r} must be a mapping.", remedy=f"{known}{how}")
    kinds = _kinds(function)
    with raised_together() as problems:
        for name, value in given.items():
            wanted = kinds.get(name, ())
            if name not in names:
                remedy = f"{did_you_mean(name, names)}{known}"
                problems.add(ConfigError(f"There is no setting '{key}.{name}'.", remedy=remedy))
            elif wanted and not any(_is_of(value, kind) for kind in wanted):
                remedy = f"Give {' or '.join('null' if kind is type(None) else kind.__name__ for kind in wanted)}."
                problems.add(ConfigError(f"{key}.{name}={value!r} is of type {type(value).__name__}.", remedy=remedy))
    return {str(name): value for name, value in given.items()}


def _kinds(function: Function) -> dict[str, tuple[type, ...]]:
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
