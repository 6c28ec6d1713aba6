"""Parses the command line: `key=value` texts become settings of the schema, leaf by leaf."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path
from typing import get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from hybridflow.config import fields
from hybridflow.config.other_names import counterpart, is_other_section, replacement
from hybridflow.errors import STRICT, ConfigError, HybridflowError, Problems
from hybridflow.launch.compose.presets import GROUPS

_FOLLOWED = {"reference": "actor", "ref": "actor"}
"""Names of the reference, and the section that configures it."""

_LITERAL = re.compile(r"[^\"'\[\]{}$,]+")
"""Text that Hydra's grammar rejects although it is unambiguous: `~/runs`, `lr=1e-5`."""


COMMAND_LINE, PYTHON, RUN_FILE = "command line", "Python", "run file"
OF_THE_USER = (COMMAND_LINE, PYTHON, RUN_FILE)
"""Origins of settings that the user typed, gave in Python, or has in run files."""

RECORD = "directory of config.yaml"
"""Origin of `trainer.run_dir` in a run that continues from the `config.yaml` in its directory."""

_QUOTED = re.compile(r"'(?:\\.|[^'\\])*'|\"(?P<double>(?:\\.|[^\"\\])*)\"", re.DOTALL)
_ESCAPE, _ESCAPES = re.compile(r"\\.", re.DOTALL), {r"\n": "\n", r"\t": "\t"}
"""Escapes within double quotes, which Hydra's grammar does not replace."""


_ELEMENT = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?<=[\[,])(?=[-+.\d])([-+.\w]+)(?=[,\]])""", re.DOTALL)
"""Quoted text, or an element of a list that may be a number and is text where the key takes texts, such as 1e3."""


@dataclass(frozen=True)
class Setting:
    """One leaf of the configuration and the value typed for it."""

    key: str
    value: object
    place: str = ""
    """The file and line, for a setting in a run file."""

    origin: str = COMMAND_LINE


@dataclass(frozen=True)
class Typed:
    """All that was typed: the choice in each group, and the settings, in order."""

    groups: dict[str, str]
    settings: list[Setting]
    unresolved: frozenset[str] = frozenset()
    """Settings with an interpolation that cannot be resolved, which are left out wherever they stand."""

    places: Mapping[str, str] = field(default_factory=dict)
    """The file and line of each group's choice, if it was not typed."""

    def followed_by(self, other: "Typed") -> "Typed":
        """Both, as if the other had been typed after this one. A new experiment does not continue that of a record."""
        places = {group: place for group, place in self.places.items() if group not in other.groups}
        is_named = any(setting.key == "trainer.experiment" for setting in other.settings)
        before = [setting for setting in self.settings if not (is_named and setting.origin == RECORD)]
        groups, settings = self.groups | other.groups, [*before, *other.settings]
        return Typed(groups, settings, places=places | dict(other.places))


@contextmanager
def named_place(place: str) -> Iterator[None]:
    """A block in which errors of settings begin with the place of the setting, if it is in a file."""
    try:
        yield
    except ConfigError as error:
        if not place:
            raise
        raise located(error, place) from error


def located(error: HybridflowError, place: Path | str | None) -> HybridflowError:
    """The error of a setting as a `ConfigError` whose message begins with the file in which it stands, if any."""
    if not place:
        return error
    return ConfigError(f"{place}: {error.message}", remedy=error.remedy, key=error.key, among=error.among)


def parse_overrides(overrides: Sequence[str], problems: Problems = STRICT) -> Typed:
    """Groups and settings. Adds a `ConfigError` for other texts, for unknown keys and for several values."""
    groups: dict[str, str] = {}
    settings: list[Setting] = []
    for text in map(_with_escapes, overrides):
        with problems.caught(text.partition("=")[0]):
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ConfigError(f"{text!r} is not UTF-8.", remedy="Write settings in UTF-8, in a UTF-8 locale.")
            key, override = _parsed(text)
            if key in GROUPS and override is not None:
                groups[key] = _choice(key, override, text)
            else:
                settings.extend(settings_of(key, _value(key, override, text), problems))
    return Typed(groups, settings)


def given_settings(given: Mapping[str, object], problems: Problems = STRICT) -> Typed:
    """Groups and settings given in Python: dotted keys and nested mappings, with values as YAML files have them.

    Adds a `ConfigError` for each key that is unknown, or whose value has no form that it takes.
    """
    groups: dict[str, str] = {}
    settings: list[Setting] = []
    for key, value in given.items():
        if key in GROUPS and isinstance(value, str):
            groups[key] = value
        else:
            settings.extend(settings_of(key, value, problems, origin=PYTHON))
    return Typed(groups, settings)


def suggestion(key: str) -> str:
    """A suggestion for an unknown key, followed by a space: the setting that replaced it, the one that
    another system calls so, or the nearest."""
    if known := replacement(key) or counterpart(key) or _of_followed_role(key) or _of_functions(key):
        return f"{known} "
    section, _, name = key.rpartition(".")
    if (close := fields.nearest(key)) and not (section in GROUPS and name == "name"):
        return f"Did you mean {close}? "
    if section in GROUPS:
        return f"Did you mean {section}=NAME? "
    names = fields.names_in(section)
    return f"Settings of {section}: {', '.join(names)}. " if section and names else ""


def _of_followed_role(key: str) -> str | None:
    """The setting that the reference, which has no section of its own, follows."""
    role, _, rest = key.partition(".")
    followed = f"{_FOLLOWED.get(role)}.{rest}"
    return f"The reference follows {followed}." if role in _FOLLOWED and fields.find(followed) is not None else None


def _of_functions(key: str) -> str | None:
    """`roles.style.settings.length.target`: settings of functions are the same in every role."""
    section, _, rest = key.partition(".")
    setting = rest.partition(".")[2]
    is_of_function = section == "roles" and setting.startswith("settings.")
    return f"Settings of functions apply in every role: reward.{setting}." if is_of_function else None


def shown(value: object) -> str:
    """A value as it is typed."""
    if value is None:
        return "null"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {shown(item)}' for name, item in value.items())}}}"
    return str(value)


def _parsed(text: str) -> tuple[str, Override | None]:
    """The key, and Hydra's parse of the text; None for a literal text that it cannot parse."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, _, value = text.partition("=")
        hint = fields.find(key)
        if (hint is str or str in get_args(hint)) and _LITERAL.fullmatch(value):
            return key, None
        raise _malformed(text) from error
    if override.is_delete() or override.package is not None or not override.key_or_group:
        raise _malformed(text)
    return override.key_or_group, override


def _with_escapes(text: str) -> str:
    """The text with the escapes `\\n` and `\\t` within double quotes replaced, as YAML does; Hydra keeps them."""

    def replaced(quoted: re.Match[str]) -> str:
        if quoted["double"] is None:
            return quoted[0]
        return _ESCAPE.sub(lambda found: _ESCAPES.get(found[0], found[0]), quoted[0])

    return _QUOTED.sub(replaced, text)


def _malformed(text: str) -> ConfigError:
    return ConfigError(
        f"'{text}' is not a setting.",
        remedy="Write key=value. Quote values with spaces, commas or braces: 'key=\"a, {b}\"'. Write lists as"
        " key=[a,b], and quote elements with spaces or an =: 'key=[\"a?b=1\",c]'.",
    )


def _choice(group: str, override: Override, text: str) -> str:
    value = override.value()
    if not isinstance(value, str):
        raise ConfigError(f"'{text}' is not a single {group} name.", remedy=f"Write {group}=NAME.")
    return value


def _value(key: str, override: Override | None, text: str) -> object:
    """The value; for a key that takes a list, one value or several without brackets are a list."""
    hint = fields.find(key)
    if hint is None:
        raise unknown_setting(key)
    literal = text.partition("=")[2]
    if override is None:
        return [literal] if fields.is_list(hint) else literal
    if fields.is_text(hint) and isinstance(override.value(), bool | int | float):
        return literal
    if fields.is_list(hint):
        if literal in ("", "null"):
            return []
        override = _listed(override, literal, has_texts=hint == list[str])
    if override.is_sweep_override() or not _is_plain(override.value()):
        raise ConfigError(
            f"'{text}' gives several values.",
            remedy=f"{key} takes {fields.type_name(hint)}; quote text with commas: '{key}=\"a, b\"'. To run once"
            " for each value, add --multirun.",
        )
    return override.value()


def _listed(override: Override, literal: str, *, has_texts: bool) -> Override:
    """The override of a key that takes a list, with its brackets and, if it takes texts, without numbers."""
    listed = literal if isinstance(override.value(), list | dict) else f"[{literal}]"
    if has_texts:
        listed = _ELEMENT.sub(lambda found: f'"{found[1]}"' if found[1] else found[0], listed)
    try:
        return OverridesParser.create().parse_override(f"{override.key_or_group}={listed}")
    except HydraException as error:
        raise _malformed(f"{override.key_or_group}={literal}") from error


def _is_plain(value: object) -> bool:
    """Whether a value holds none of Hydra's sweeps, such as `glob(*)`, which its parser leaves as objects in lists."""
    if isinstance(value, list | dict):
        return all(_is_plain(item) for item in (value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, str | int | float)


def settings_of(
    key: str,
    value: object,
    problems: Problems = STRICT,
    place_of: Callable[[str], str] = lambda key: "",
    *,
    origin: str = COMMAND_LINE,
) -> Iterator[Setting]:
    """A section or table given as {name: value, ...} is one setting per name; one value for a list is a list of it.

    Adds a `ConfigError` for each that is unknown, or has no form that its key takes. `place_of` gives the file and the
    line of a key in a file.
    """
    key, value = fields.meant(key, value)
    hint, place = fields.find(key), place_of(key)
    has_settings = is_dataclass(hint) or get_origin(hint) is dict or (hint is None and is_other_section(key))
    if isinstance(value, dict) and value and has_settings:
        for name, item in value.items():
            yield from settings_of(f"{key}.{name}", item, problems, place_of, origin=origin)
        return
    if fields.is_list(hint) and not isinstance(value, list | dict):
        value = [] if value is None else [value]
    with problems.caught(key), named_place(place):
        if hint is None:
            raise unknown_setting(key)
        is_wrong_mapping = isinstance(value, dict) and fields.is_list(hint)
        is_no_mapping = is_dataclass(hint) or (get_origin(hint) is dict and value is not None)
        if is_wrong_mapping or (is_no_mapping and value != {}):
            raise ConfigError(f"{key}={value} has the wrong type.", remedy=f"{key} takes {fields.type_name(hint)}.")
        if hint is bool and isinstance(value, int | float) and not isinstance(value, bool):
            # 2 is more likely a mistake than `true`
            raise ConfigError(f"{key}={value} has the wrong type.", remedy=f"{key} takes true or false.")
        yield Setting(key, value, place, origin)


def unknown_setting(key: str) -> ConfigError:
    """The error for a key that is not of the schema, with the nearest one."""
    return ConfigError(f"There is no setting '{key}'.", remedy=f"{suggestion(key)}All settings: hybridflow --help all.")
