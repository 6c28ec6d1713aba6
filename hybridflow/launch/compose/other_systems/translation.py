"""Settings of another system as settings of hybridflow."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import yaml

from hybridflow.config import fields
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.other_names import NONE, OtherName, other_name, other_names, plain_value
from hybridflow.errors import ConfigError

NO_CRITIC = "the algorithm has no critic"
NOT_GIVEN = ""
"""The value of a setting that nobody gave."""

_OPTION = re.compile(r"--?[A-Za-z]")
_FIRST = ("model", "data", "algorithm", "dataflow", "dataflow_settings", "reward", "rollout", "actor", "critic")
"""Sections in the order in which a translated command has them; the others follow."""


_LONGEST_SHOWN = 200
"""The most characters of a value in what is said of it."""


@dataclass(frozen=True)
class Here:
    """Settings of another system, and what they are here; without settings, what happens anyway."""

    names: Sequence[str]
    settings: Mapping[str, object] = field(default_factory=dict)
    because: str = ""
    """The reason for the settings, if no name implies them."""


@dataclass(frozen=True)
class NotNeeded:
    """Settings without a counterpart that the results do not depend on."""

    names: Sequence[str]
    reason: str


@dataclass(frozen=True)
class Missing:
    """A setting that changes the results and is not translated."""

    name: str
    reason: str


Outcome = Here | NotNeeded | Missing


class Given:
    """The settings of another system's command, with its defaults."""

    def __init__(self, given: Mapping[str, str], defaults: Mapping[str, str]) -> None:
        self.given = given
        self._defaults = defaults

    def text(self, name: str, default: str = NOT_GIVEN) -> str:
        """The value given; else the system's default, or this one."""
        value = self.given.get(name, self._defaults.get(name, default))
        return self.text(value[1:]) if value.startswith("=") else value

    def has(self, name: str) -> bool:
        """Whether there is a value other than null."""
        return self.text(name) != NOT_GIVEN and plain_value(self.text(name)) != "null"

    def is_true(self, name: str, default: str = "false") -> bool:
        """Whether a switch is on."""
        return plain_value(self.text(name, default)) == "true"

    def number(self, name: str, default: float = 0) -> float:
        """A finite number. Raises `ConfigError` for anything else."""
        text = self.text(name) if self.has(name) else str(default)
        with suppress(ValueError):
            if math.isfinite(found := float(text)):
                return found
        raise ConfigError(f"{name}={text} is not a number.", remedy=f"Write {name}=1.")

    def count(self, name: str, default: float = 0) -> float:
        """A number above 0. Raises `ConfigError` for anything else."""
        if (found := self.number(name, default)) <= 0:
            raise ConfigError(f"{name}={found:g} is not above 0.", remedy=f"Write {name}=1 or more.")
        return found

    def names(self, *beginnings: str) -> list[str]:
        """The names given that begin so."""
        return [name for name in self.given if name.startswith(beginnings)]

    def given_of(self, names: Iterable[str]) -> list[str]:
        """Those of the names that are not defaults."""
        return [name for name in names if name in self.given or name not in self._defaults]


Rule = Callable[[Given, Sequence[str]], Iterator[Outcome]]
"""Translates several names together: those given or with a default. Rules that always apply may get none."""


@dataclass(frozen=True)
class System:
    """A system: its rules for settings that are translated together, by their names in `other_names.yaml`."""

    name: str
    rules: Mapping[str, Rule]
    always: Sequence[str] = ()
    """Rules that also apply if none of their names is given."""

    accepts_own: bool = False
    """Whether names that the schema has are settings of hybridflow."""

    key_of: Callable[[str], str] = str
    """The key of a name as it is typed."""


@dataclass(frozen=True)
class Translation:
    """A command of another system as one of hybridflow."""

    settings: Mapping[str, str]
    """The settings here, by key, as they are typed; `algorithm` chooses a preset."""

    shown: Sequence[tuple[str, str]]
    """Each setting and its counterpart: `("rollout.n=5", "rollout.samples_per_prompt=5")`."""

    not_needed: Sequence[NotNeeded]
    missing: Sequence[Missing]

    def words(self) -> list[str]:
        """The settings as words of a command line."""
        return [f"{key}={value}" for key, value in sorted(self.settings.items(), key=_position)]


def translated(system: System, given: Mapping[str, str], defaults: Mapping[str, str]) -> Translation:
    """Translates settings of a system. A value with an unknown part of the shell (`$(date)`) is missing."""
    source = Given({name: value for name, value in given.items() if "$" not in value}, defaults)
    outcomes: list[Outcome] = [
        Missing(name, f"its value {_brief(value)} is not known without running the script; give the value itself")
        for name, value in given.items()
        if "$" in value
    ]
    groups: dict[str, list[str]] = {rule: [] for rule in system.always}
    for name in [*source.given, *(name for name in defaults if name not in given)]:
        row = other_name(system.name, name)
        if row is None:
            outcomes.append(_unlisted(system, name, source))
        elif row.by:
            groups.setdefault(_group(row, name), []).append(name)
        else:
            outcomes.append(_by_value(system, row, name, source))
    for group, names in groups.items():
        outcomes += system.rules[group](source, names)
    here = [found for found in outcomes if isinstance(found, Here) and found.settings]
    settings = {key: typed(value) for found in here for key, value in found.settings.items()}
    own = {name for name in source.given if system.accepts_own and other_name(system.name, name) is None}
    settings |= {key: typed(value) for key, value in source.given.items() if key in own and key in settings}
    lines = [_line(found, source, system) for found in here]
    unneeded = [(source.given_of(found.names), found.reason) for found in outcomes if isinstance(found, NotNeeded)]
    return Translation(
        settings,
        [(theirs, here) for theirs, here in lines if theirs != here],
        [NotNeeded([*map(system.key_of, names)], reason) for names, reason in unneeded if names],
        [
            Missing(_origin(found, source, defaults) + _brief(system.key_of(found.name)), found.reason)
            for found in outcomes
            if isinstance(found, Missing)
        ],
    )


def translated_without(
    unused: Mapping[str, Collection[str]], system: System, given: Mapping[str, str], defaults: Mapping[str, str]
) -> Translation:
    """Translates settings of a system without those that change nothing, by the reason why they do not."""
    names = {name for those in unused.values() for name in those}
    used, assumed = ({name: text for name, text in each.items() if name not in names} for each in (given, defaults))
    found = translated(system, used, assumed)
    left_out = [NotNeeded([name for name in those if name in given], reason) for reason, those in unused.items()]
    return replace(found, not_needed=[*found.not_needed, *(each for each in left_out if each.names)])


def _origin(found: Missing, source: Given, defaults: Mapping[str, str]) -> str:
    name = found.name.partition("=")[0]
    return "default " if name in defaults and name not in source.given else ""


def _brief(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def typed(value: object) -> str:
    """A value as it is typed: lists without quotes where they are not needed."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}" if value != int(value) else f"{int(value)}"
    if isinstance(value, list):
        return f"[{','.join(in_quotes(str(item)) for item in value)}]"
    text = str(value)
    if text.startswith("[") and isinstance(found := as_list(text), list):
        return typed(found)
    return text


def in_quotes(text: str) -> str:
    """Text of another system as a value here, in quotes where a command line needs them."""
    return text if text and all(c.isalnum() or c in "_-./:~@+" for c in text) else f'"{text}"'


def as_list(text: str) -> list[str]:
    """The elements of `['a', 'b']`, `[a,b]` or `a`."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        found = text
    return [str(item) for item in found] if isinstance(found, list) else [text]


def options_of(words: Sequence[str]) -> dict[str, str]:
    """`--name value ...`, `--name=value` and `--switch`, by name; several values are joined by commas."""
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if _OPTION.match(word):
            name, equals, value = word.lstrip("-").partition("=")
            found[name] = [value] if equals else []
        elif name:
            found[name].append(word.rstrip(","))
    return {name: ",".join(values) if values else "true" for name, values in found.items()}


def limit_of_both(prompt: int, response: int) -> str:
    """Why a limit of prompt and response together is not translated."""
    return (
        f"it limits prompt and response together, hybridflow each of them: here {prompt} and {response} tokens; set"
        " data.max_prompt_tokens and data.max_response_tokens to what the data need"
    )


def _group(row: OtherName, name: str) -> str:
    """The rule, for each role separately where a role has the setting."""
    role = "critic" if name.startswith("critic.") else ""
    return f"{row.by} {role}".strip()


def _by_value(system: System, row: OtherName, name: str, source: Given) -> Outcome:
    """A setting that is translated on its own."""
    value = source.text(name)
    if row.values is not None:
        text = row.values.get(plain_value(value), row.values.get("*"))
        if text is None:
            return Missing(f"{name}={value}", _words(row))
        if text.startswith(NONE):
            return NotNeeded([name], text.removeprefix(NONE))
        settings = (part.partition("=") for part in text.replace("{}", value).split())
        return Here([name], {key: chosen for key, _, chosen in settings})
    if row.here.startswith(NONE):
        return NotNeeded([name], row.here.removeprefix(NONE))
    keys = row.here.partition(",")[0].split(" and ")
    if any(fields.find(key) is None for key in keys) or row.name != name:
        return Missing(f"{name}={value}", _words(row))
    if value in ("", "null"):
        return Missing(f"{name}={value}", "it has no value; leave it out, or give one")
    if system.accepts_own:
        return Here([name], dict.fromkeys(keys, value))
    return Here(
        [name], {key: value.split(",") if fields.is_list(fields.find(key)) else in_quotes(value) for key in keys}
    )


def _words(row: OtherName) -> str:
    return row.here.removeprefix(NONE) if row.here.startswith(NONE) else f"use {row.here}"


def _unlisted(system: System, name: str, source: Given) -> Outcome:
    if system.accepts_own and fields.find(name) is not None:
        return Here([name], {name: source.text(name)})
    near = did_you_mean(system.key_of(name), [*map(system.key_of, other_names()[system.name])])
    unknown = f"hybridflow does not know this setting of {system.name}. {near}"
    return Missing(f"{name}={source.text(name)}", unknown.strip())


def _line(found: Here, source: Given, system: System) -> tuple[str, str]:
    """The settings given, or the defaults or whatever else implies those here; and the settings here."""
    given = [f"{system.key_of(name)}={source.text(name)}" for name in source.given_of(found.names)]
    default = [f"{system.key_of(name)}={source.text(name)}" for name in found.names]
    theirs = " ".join(given) or (f"default {' '.join(default)}" if default else found.because)
    return theirs, " ".join(f"{key}={typed(value)}" for key, value in found.settings.items())


def _position(setting: tuple[str, str]) -> tuple[int, str]:
    section = setting[0].partition(".")[0]
    return (_FIRST.index(section) if section in _FIRST else len(_FIRST), "")
