"""Configuration files: the package's and the user's, composed by Hydra, and the keys set in the user's."""

import copy
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import cast

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException, ValidationError

from hybridflow.config import fields
from hybridflow.config.directory import config_directory
from hybridflow.config.experiment import Experiment
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role
from hybridflow.config.schema import register_schema
from hybridflow.config.section import ORIGIN
from hybridflow.errors import STRICT, ConfigError, HybridflowError, Problems
from hybridflow.launch.compose.overrides import Setting, Typed, located, named_place, settings_of
from hybridflow.launch.compose.presets import plain_name, preset_name
from hybridflow.launch.compose.trainers import find_command, shown_name

TABLES: dict[str, type | None] = {
    "roles": Role,
    "placement.pools": Pool,
    "placement.roles": None,
    "dataflow_settings": None,
    "algorithm.advantage_settings": None,
    "algorithm.loss_settings": None,
    "reward.settings": None,
}
"""Tables whose rows the user names, and the section that a row is."""

_MOST_NODES = 100_000
"""Names and values that a run file may hold."""

_MOST_LEVELS = 100
"""Levels of nesting that a run file may have."""

_NOT_SETTINGS = ("defaults", "hydra", "command")
"""Keys of configurations that Hydra reads, and of a run's record that `hybridflow run` reads."""

_NOT_OPTIONAL = "is not Optional"
_NOT_A_CHOICE = re.compile(r"Invalid value '(?P<value>.*)', expected one of \[(?P<choices>.*)\]")
"""OmegaConf's message for a value that its enumeration does not have."""


def read_files(
    config_name: str, directory: Path, typed: Typed, described: Mapping[str, Role], problems: Problems = STRICT
) -> tuple[DictConfig, dict[str, Path]]:
    """The composed configuration, and for each key set in the user's own files the last file that sets it.

    Reads the schema's defaults and a dataflow's own roles, the named file, and the group files that it or the command
    line chooses. The keys of a run's record are not listed.
    With `problems` that collect, a setting in a user's file that cannot be read is left out and reported there, and a
    file whose defaults cannot be found starts from those of `hybridflow ppo`. Raises `ConfigError` for a group that is
    typed.
    """
    file = directory / f"{config_name}.yaml"
    if directory != config_directory():
        try:
            file_content(file)
        except ConfigError as error:
            problems.add(error)
            return read_files("ppo", config_directory(), typed, described, problems)
    choices = [f"{group}={_file_of(group, choice, directory)}" for group, choice in typed.groups.items()]
    try:
        choices += _task_left_out(typed, file)
        if directory == config_directory() and not described:
            return copy.deepcopy(_package_files(config_name, tuple(choices))), {}
        parts = _parts(config_name, directory, choices)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ConfigError) as error:
        problem = error if isinstance(error, ConfigError) else _explained(error, file, choices)
        if typed.groups or directory == config_directory():
            raise problem from error
        problems.add(problem)
        parts = [*_parts("ppo", config_directory(), []), (file, "")]
    return _composed(parts, described, problems, typed.unresolved)


def _parts(config_name: str, directory: Path, choices: Sequence[str]) -> list[tuple[Path, str]]:
    """The files that Hydra composes, in order, each with the section that it holds ("" for all)."""
    register_schema()
    # A user's own directory may choose among the package's groups.
    search_path = f"hydra.searchpath=[{config_directory().as_uri()}]"
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None, job_name="hybridflow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without _self_, a file's own settings come last, as everywhere here
        loader = GlobalHydra.instance().config_loader()
        found = loader.compute_defaults_list(config_name, [search_path, *choices], RunMode.RUN).defaults
    parts = []
    for part in found:
        name = f"{(part.config_path or '').removesuffix('.yaml')}.yaml"
        file = next((folder / name for folder in (directory, config_directory()) if (folder / name).is_file()), None)
        parts += [(file, part.package or "")] if file is not None else []  # others: the schema, and Hydra's own
    return parts


def _composed(
    parts: Sequence[tuple[Path, str]], described: Mapping[str, Role], problems: Problems, unresolved: frozenset[str]
) -> tuple[DictConfig, dict[str, Path]]:
    config, in_files = OmegaConf.structured(Experiment(roles=dict(described))), {}
    for file, section in parts:
        content = {name: value for name, value in file_content(file).items() if name not in _NOT_SETTINGS}
        if file.is_relative_to(config_directory()):
            config = cast(DictConfig, OmegaConf.merge(config, {section: content} if section else content))
            continue
        own = Problems(collects=True)
        prefix = f"{section}." if section else ""
        settings = [s for name, item in content.items() for s in settings_of(f"{prefix}{name}", item, own)]
        apply_settings(config, [setting for setting in settings if setting.key not in unresolved], own)
        problems.add(*(located(error, file) for error in own.found))
        in_files |= {} if ORIGIN in file.read_text() else {setting.key: file for setting in settings}
    return config, in_files


def file_content(file: Path) -> dict[str, object]:
    """The content of a YAML file by name. Raises `ConfigError` for a file that cannot be read, or holds no names."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except GrammarParseError:  # an interpolation: reported when its setting is applied
        content = yaml.safe_load(file.read_text())
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeError) as error:
        raise _explained(error, file, []) from error
    except RecursionError as error:
        raise _too_deep(file) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold settings by name.", remedy="Write name: value; see hybridflow --help all.")
    return {str(name): value for name, value in content.items()}


def file_nodes(file: Path) -> yaml.Node | None:
    """The nodes of a YAML file, which know their lines; None for an empty file.

    Raises `ConfigError` for a file that cannot be read, that refers to itself, or whose aliases make it too large.
    """
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if sum(1 for _ in islice(_nodes_below(node), _MOST_NODES)) < _MOST_NODES:
            return node
    except RecursionError:
        pass
    except (yaml.YAMLError, OSError, UnicodeError) as error:
        raise _explained(error, file, []) from error
    raise _too_deep(file)


def _too_deep(file: Path) -> ConfigError:
    return ConfigError(f"{file} is nested too deeply or too large.", remedy="Write each setting once, as key: value.")


def _nodes_below(node: yaml.Node | None, depth: int = 0) -> Iterator[yaml.Node]:
    """All nodes, those behind an alias at each of its places. Raises `RecursionError` below `_MOST_LEVELS` levels."""
    if depth > _MOST_LEVELS:
        raise RecursionError
    if node is not None:
        yield node
    if isinstance(node, yaml.CollectionNode):
        for inner in node.value:
            for item in inner if isinstance(inner, tuple) else (inner,):
                yield from _nodes_below(item, depth + 1)


@lru_cache(maxsize=128)
def _package_files(config_name: str, choices: tuple[str, ...]) -> DictConfig:
    """Files of the package do not change: they are composed once."""
    return _composed(_parts(config_name, config_directory(), choices), {}, STRICT, frozenset())[0]


def apply_settings(config: DictConfig, settings: Sequence[Setting], problems: Problems) -> None:
    """Sets each in turn. One with a wrong type, or outside its range, is reported and left as it was."""
    for setting in settings:
        with problems.caught(setting.key), named_place(setting.place):
            try:
                fields.check_range(setting.key, setting.value)
                _set(config, setting)
            except OmegaConfBaseException as error:
                raise wrong_value(setting.key, error) from error


def _set(config: DictConfig, setting: Setting) -> None:
    """Sets one leaf; creates the row of a table when it is first named."""
    table = next((name for name in TABLES if setting.key.startswith(f"{name}.")), None)
    if table is None:
        OmegaConf.update(config, setting.key, setting.value)
        return
    row = setting.key.removeprefix(f"{table}.").partition(".")[0]
    section = TABLES[table]
    with open_dict(config):
        rows = OmegaConf.select(config, table)
        if section is not None and row not in rows:
            rows[row] = OmegaConf.structured(section)
        OmegaConf.update(config, setting.key, setting.value)


def wrong_value(key: str, error: BaseException, hint: object = None) -> ConfigError:
    """The error for a value that OmegaConf rejects, in terms of the setting.

    `hint` is the type that the setting takes, by default the one that the schema has for `key`.
    """
    takes = fields.words(key) if hint is None else fields.type_name(hint)
    if choice := _NOT_A_CHOICE.match(_first_line(error)):
        value, choices = choice["value"], choice["choices"].split(", ")
        return ConfigError(f"{key}={value} is unknown.", remedy=f"{did_you_mean(value, choices)}{key} must be {takes}.")
    remedy = f"{key} takes {takes}."
    if isinstance(error, ValidationError):
        if _NOT_OPTIONAL in _first_line(error):
            return ConfigError(f"{key} cannot be null.", remedy=f"{remedy} For its default, leave it out.", key=key)
        return ConfigError(f"{key} has the wrong type: {_first_line(error)}.", remedy=remedy, key=key)
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        remedy = f"Name a setting as in ${{trainer.seed}}, or a variable that is set as in ${{oc.env:NAME}}. {remedy}"
    return ConfigError(f"{key} cannot be set: {_first_line(error)}.", remedy=remedy, key=key)


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
    found = [content := file_content(file)]
    for name in cast(Sequence[object], content.get("defaults") or []):
        places = [folder / f"{name}.yaml" for folder in (file.parent, config_directory())]
        further = next((place for place in places if place != file and place.is_file()), None)
        found += _built_on(further) if isinstance(name, str) and further is not None else []
    return found


def _explained(error: Exception, file: Path, choices: Sequence[str]) -> HybridflowError:
    """The error of a file: the key, what was found, and what is expected there."""
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or []
        found = f"There is no {group}={name}." if group else f"{file} builds on '{name}', which does not exist."
        name = plain_name(name) if group == "algorithm" else name
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
            remedy=f"Leave it out, or {'use it with hybridflow ppo' if is_ours else other}.",
        )
    is_own = isinstance(error, OmegaConfBaseException | yaml.YAMLError)
    cause = error if is_own else error.__cause__ or error.__context__ or error
    if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark is not None:
        at = cause.problem_mark
        name = at.name if Path(at.name).is_file() else file  # OmegaConf and PyYAML also parse texts
        remedy = "Correct the YAML: name: value. All settings: hybridflow --help all."
        return ConfigError(f"{name}: {cause.problem} (line {at.line + 1}).", remedy=remedy)
    if isinstance(cause, GrammarParseError):
        return located(wrong_value(str(cause.full_key), cause), file)
    return ConfigError(f"{file}: {' '.join(str(cause).split())}.", remedy="All settings: hybridflow --help all.")


def _trainer_of(name: str) -> str | None:
    """The command for an algorithm that `hybridflow ppo` does not run because it does not sample."""
    found = find_command(name)
    return None if found is None or found.trainer == "ppo" else f"hybridflow {shown_name(name)}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")
