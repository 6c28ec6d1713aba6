"""The command line to a checked, sealed configuration. No process is started, torch is not imported."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, ValidationError

from hybridflow.config import fields
from hybridflow.config.checks import check
from hybridflow.config.experiment import Experiment
from hybridflow.config.placement import Pool
from hybridflow.config.roles import Role
from hybridflow.config.schema import config_directory, register_schema
from hybridflow.config.sealed import sealed
from hybridflow.errors import ConfigError

GROUPS = ("algorithm",)
TABLES: dict[str, type | None] = {
    "roles": Role,
    "placement.pools": Pool,
    "placement.roles": None,
    "dataflow_settings": None,
}
"""Tables whose rows the user names, and the section that a row is."""


@dataclass(frozen=True)
class Composed:
    """A configuration, and where each value comes from: `default`, `file` or `command line`."""

    config: Experiment
    origins: Mapping[str, str]

    def flat(self) -> dict[str, object]:
        """Every leaf by its dotted path, as plain values."""
        return _leaves(OmegaConf.structured(self.config))


def compose_run(overrides: Sequence[str], *, config_name: str, config_dir: Path | None = None) -> Composed:
    """The checked, sealed configuration of `config_name` with overrides. Raises `ConfigError` for what cannot work."""
    register_schema()
    directory = config_dir.resolve() if config_dir else config_directory()
    if not (directory / f"{config_name}.yaml").is_file():
        found = ", ".join(sorted(path.stem for path in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"There is no {config_name}.yaml in {directory}.", remedy=f"Configurations there: {found}.")
    parsed = [_checked(override) for override in _parsed(overrides)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(directory), version_base=None, job_name="hybridflow"):
        from_files = _compose(config_name, [p for p in parsed if p.is_group])
        whole = _compose(config_name, parsed)
    config = OmegaConf.to_object(whole)
    assert isinstance(config, Experiment), f"composed a {type(config)}"
    check(config)
    return Composed(sealed(config), _origins(from_files, whole, [p.key for p in parsed if not p.is_group]))


def parse_command_line(argv: Sequence[str], *, program: str, config_name: str) -> argparse.Namespace:
    """Flags and overrides: `overrides`, `config_name`, `config_dir`, `cfg`, `help`."""
    parser = argparse.ArgumentParser(prog=program, add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--config-name", "-cn", default=config_name)
    parser.add_argument("--config-dir", "-cd", "--config-path", "-cp", type=Path)
    parser.add_argument("overrides", nargs="*")
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(
            f"There is no option {unknown[0]}.", remedy="Settings are written key=value, without dashes; see --help."
        )
    return known


@dataclass(frozen=True)
class _Checked:
    key: str
    text: str
    value: object
    is_group: bool

    @property
    def is_in_table(self) -> bool:
        """Hydra cannot add rows to a table of sections, so that is done after it."""
        return self.key.startswith(tuple(f"{table}." for table in TABLES))


def _parsed(overrides: Sequence[str]) -> list[Override]:
    parsed = []
    for text in overrides:
        try:
            parsed += OverridesParser.create().parse_overrides([text])
        except (OverrideParseException, HydraException) as error:
            raise ConfigError(
                f"'{text}' is not a setting.",
                remedy="Write key=value; quote values with spaces or commas: 'key=\"a, b\"'; lists as key=[a,b].",
            ) from error
    return parsed


def _checked(override: Override) -> _Checked:
    """An override whose key exists; a single value for a list becomes a list of one."""
    key, text = override.key_or_group, str(override.input_line).lstrip("+")
    if key in GROUPS and isinstance(override.value(), str):
        return _Checked(key, text, override.value(), is_group=True)
    hint = fields.find(key)
    if hint is None:
        close = fields.nearest(key)
        hint_text = f"Did you mean {close}? " if close else ""
        raise ConfigError(f"There is no setting '{key}'.", remedy=f"{hint_text}All settings: --help.")
    if fields.is_list(hint) and not isinstance(override.value(), list):
        name, _, value = text.partition("=")
        text = f"{name}=[{value}]" if value not in ("", "null") else f"{name}=[]"
    return _Checked(key, text, override.value(), is_group=False)


def _compose(config_name: str, overrides: Sequence[_Checked]) -> DictConfig:
    try:
        config = compose(config_name, overrides=[o.text for o in overrides if not o.is_in_table])
        for override in overrides:
            if override.is_in_table:
                _set_in_table(config, override)
        return config
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").partition("/")
        options = ", ".join(error.options or [])
        raise ConfigError(f"There is no {group}={name}.", remedy=f"Choose from: {options}.") from error
    except (ConfigCompositionException, OmegaConfBaseException) as error:
        raise _explained(error) from error


def _set_in_table(config: DictConfig, override: _Checked) -> None:
    table = next(name for name in TABLES if override.key.startswith(f"{name}."))
    row = override.key.removeprefix(f"{table}.").partition(".")[0]
    section = TABLES[table]
    with open_dict(config):
        rows = OmegaConf.select(config, table)
        if section is not None and row not in rows:
            rows[row] = OmegaConf.structured(section)
        OmegaConf.update(config, override.key, override.value)


def _explained(error: Exception) -> ConfigError:
    """Hydra's words in ours: the key, what was found, and what is expected there."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    key = str(cause.full_key or "") if isinstance(cause, OmegaConfBaseException) else ""
    hint = fields.find(key) if key else None
    text = str(cause).splitlines()[0]
    if hint is None:
        close = fields.nearest(key) if key else None
        return ConfigError(text + ".", remedy=f"Did you mean {close}?" if close else "See --help for all settings.")
    remedy = f"{key} takes {fields.type_name(hint)}."
    kind = "has the wrong type" if isinstance(cause, ValidationError) else "cannot be set"
    return ConfigError(f"{key} {kind}: {text}.", remedy=remedy)


def _origins(from_files: DictConfig, whole: DictConfig, typed: Sequence[str]) -> dict[str, str]:
    """For each leaf, where its value comes from."""
    defaults = _leaves(OmegaConf.structured(Experiment))
    files = _leaves(from_files)
    origins = {}
    for leaf in _leaves(whole):
        if any(leaf == key or leaf.startswith(f"{key}.") or leaf.startswith(f"{key}[") for key in typed):
            origins[leaf] = "command line"
        elif leaf not in defaults or defaults[leaf] != files.get(leaf):
            origins[leaf] = "file"
        else:
            origins[leaf] = "default"
    return origins


def _leaves(config: DictConfig) -> dict[str, object]:
    plain = OmegaConf.to_container(config, enum_to_str=True)
    found: dict[str, object] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else str(name))
        else:
            found[path] = value

    walk(plain, "")
    return found
