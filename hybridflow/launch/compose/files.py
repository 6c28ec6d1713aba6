"""Configuration files: the package's and the user's, composed by Hydra, and the keys set in the user's."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.config import fields
from hybridflow.config.choices import PREFERENCE_SYNONYMS
from hybridflow.config.experiment import Experiment
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.roles import Role
from hybridflow.config.schema import config_directory, register_schema
from hybridflow.config.section import leaves
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.overrides import Typed, check_switch, suggestion
from hybridflow.launch.compose.presets import preset_name

_GLOBAL_PACKAGE = "# @package _global_"

_NOT_A_CHOICE = re.compile(r"Invalid value '(?P<value>.*)', expected one of \[(?P<choices>.*)\]")
"""OmegaConf's message for a value that its enumeration does not have."""


def read_files(config_name: str, directory: Path, typed: Typed, described: Mapping[str, Role]) -> DictConfig:
    """The schema's defaults and a dataflow's own roles, the named file, and the group files it or the command line
    chooses."""
    choices = [f"{group}={_file_of(group, choice, directory)}" for group, choice in typed.groups.items()]
    try:
        choices += _task_left_out(typed, directory / f"{config_name}.yaml")
        if directory == config_directory() and not described:
            config = copy.deepcopy(_package_files(config_name, tuple(choices)))
        else:
            config = _composed(config_name, directory, choices, described)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise _explained(error, directory / f"{config_name}.yaml", choices) from error
    if OmegaConf.get_type(config) is not Experiment:
        raise ConfigError(
            f"{directory / config_name}.yaml does not build on the settings of this package.",
            remedy="Begin it with: defaults: [experiment, _self_].",
        )
    return config


def _composed(config_name: str, directory: Path, choices: Sequence[str], described: Mapping[str, Role]) -> DictConfig:
    register_schema(described)
    # A user's own directory may choose among the package's groups.
    search_path = f"hydra.searchpath=[{config_directory().as_uri()}]"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None, job_name="hybridflow"):
        return compose(config_name, overrides=[search_path, *choices])


@lru_cache(maxsize=128)
def _package_files(config_name: str, choices: tuple[str, ...]) -> DictConfig:
    """Files of the package do not change: they are composed once."""
    return _composed(config_name, config_directory(), choices, {})


def keys_in_files(file: Path, typed: Typed) -> frozenset[str]:
    """The keys that the user's own files set. Raises `ConfigError` for a switch that is set to a number."""
    found = dict(_leaves_in_files(file, typed.groups))
    for key, value in found.items():
        check_switch(key, value)
    return frozenset(found)


def wrong_value(key: str, error: BaseException, hint: object = None) -> ConfigError:
    """The error for a value that OmegaConf rejects, in terms of the setting.

    `hint` is the type that the setting takes, by default the one that the schema has for `key`.
    """
    takes = fields.type_name(fields.find(key) if hint is None else hint)
    if choice := _NOT_A_CHOICE.match(_first_line(error)):
        value, choices = choice["value"], choice["choices"].split(", ")
        return ConfigError(f"{key}={value} is unknown.", remedy=f"{did_you_mean(value, choices)}{key} must be {takes}.")
    kind = "has the wrong type" if isinstance(error, ValidationError) else "cannot be set"
    return ConfigError(f"{key} {kind}: {_first_line(error)}.", remedy=f"{key} takes {takes}.")


def _file_of(group: str, choice: str, directory: Path) -> str:
    """The choice behind a synonym, unless the user has a file of that name."""
    is_known = group != "algorithm" or (directory / group / f"{choice}.yaml").is_file()
    return choice if is_known else preset_name(choice)


def _task_left_out(typed: Typed, file: Path) -> list[str]:
    """Chooses no task if the model is not a built-in one: settings that fit the built-in model would be
    wrong for another. A user's file that names both a model and a task keeps both."""
    if "task" in typed.groups:
        return []
    named = [str(setting.value) for setting in typed.settings if setting.key == "model.path"]
    for content in _built_on(file):
        chooses_task = any(isinstance(choice, dict) and "task" in choice for choice in content.get("defaults") or [])
        if chooses_task:
            return ["task=none"] if named and not named[-1].startswith("builtin:") else []
        model = content.get("model")
        if not named and isinstance(model, dict) and model.get("path"):
            named = [str(model["path"])]
    return []


def _built_on(file: Path) -> list[dict]:
    """The contents of a file and of the files in its defaults, the nearest first: the user's, then the package's."""
    content = yaml.safe_load(file.read_text()) if file.is_file() else None
    if not isinstance(content, dict):
        return []
    found = [content]
    for name in content.get("defaults") or []:
        places = [folder / f"{name}.yaml" for folder in (file.parent, config_directory())]
        further = next((place for place in places if place != file and place.is_file()), None)
        found += _built_on(further) if isinstance(name, str) and further is not None else []
    return found


def _explained(error: Exception, file: Path, choices: Sequence[str]) -> ConfigError:
    """The error of a file: the key, what was found, and what is expected there."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or []
        found = f"There is no {group}={name}." if group else f"{file} builds on '{name}', which is not there."
        if group == "algorithm" and (trainer := _trainer_of(name)):
            return ConfigError(found, remedy=f"It has its own trainer: {trainer}.")
        if group == "algorithm" and preset_name(name) in options:
            return ConfigError(found, remedy=f"It is called {preset_name(name)} here.")
        return ConfigError(
            found, remedy=f"{did_you_mean(name, options)}Choose from: {', '.join(options) or 'experiment'}."
        )
    if "Could not override" in str(error):
        is_ours = file.parent == config_directory()
        other = f"add '{choices[0].replace('=', ': ')}' to the defaults in {file}"
        return ConfigError(
            f"{choices[0]} has no effect with {file.name}, which selects no {choices[0].partition('=')[0]}.",
            remedy=f"Leave it out, or {'use it with python -m hybridflow.trainer.main_ppo' if is_ours else other}.",
        )
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__ or error
    key = str(cause.full_key or "") if isinstance(cause, OmegaConfBaseException) else ""
    if key and fields.find(key) is not None:
        wrong = wrong_value(key, cause)
        return ConfigError(f"{file}: {wrong.message}", remedy=wrong.remedy)
    found = f"there is no setting '{key}'" if key else " ".join(str(cause).split())
    return ConfigError(f"{file}: {found}.", remedy=f"{suggestion(key) if key else ''}All settings: --help.")


def _trainer_of(name: str) -> str | None:
    """The command for an algorithm that main_ppo does not run because it does not sample."""
    module = "python -m hybridflow.trainer.main_"
    if (config_directory() / f"{name}.yaml").is_file():
        return f"{module}{name}"
    known = name in PREFERENCE_LOSSES or name in PREFERENCE_SYNONYMS
    return f"{module}dpo algorithm.preference.loss={name}" if known else None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _leaves_in_files(file: Path, groups: Mapping[str, str], *, section: str = "") -> Iterator[tuple[str, object]]:
    """The keys and values in a user's configuration, and in those in its directory that it builds on.

    `groups` are the choices of the command line, which take precedence. Empty for a file of the package.
    """
    if file.parent.is_relative_to(config_directory()) or not file.is_file():
        return
    text = file.read_text()
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        return
    prefix = "" if text.startswith(_GLOBAL_PACKAGE) else section
    yield from leaves({name: value for name, value in content.items() if name not in ("defaults", "hydra")}, prefix)
    for entry in content.get("defaults") or []:
        if isinstance(entry, dict):
            for key, choice in entry.items():
                group = str(key).removeprefix("override ").strip("/")
                chosen = file.parent / group / f"{groups.get(group, choice)}.yaml"
                yield from _leaves_in_files(chosen, groups, section=group.replace("/", "."))
        else:
            yield from _leaves_in_files(file.parent / f"{entry}.yaml", groups)
