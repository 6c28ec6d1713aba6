"""The dataflow by name or from a file, and its settings."""

import difflib
import importlib.util
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridflow.config import fields as config_fields
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.interface import Dataflow
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.sft import SFT
from hybridflow.errors import ConfigError

DATAFLOWS: dict[str, type[Dataflow]] = {"ppo": PPO, "grpo": GRPO, "sft": SFT}


def find_dataflow(name: str) -> type[Dataflow]:
    """The class behind `dataflow=<name>` or `dataflow=<file.py>:<Class>`."""
    if name in DATAFLOWS:
        return DATAFLOWS[name]
    file, separator, class_name = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        close = difflib.get_close_matches(name, DATAFLOWS, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"dataflow={name} is unknown.", remedy=f"{hint}Choose from: {', '.join(DATAFLOWS)}, or file.py:Class."
        )
    found = _class_in_file(Path(file), class_name)
    if not (isinstance(found, type) and issubclass(found, Dataflow)):
        raise ConfigError(
            f"dataflow={name}: '{class_name}' is not a dataflow.",
            remedy=f"Write 'class {class_name}(Dataflow)', from hybridflow.dataflows.interface.",
        )
    return found


def make_settings(dataflow: type[Dataflow], given: dict[str, object]) -> object:
    """The dataflow's `Settings`, with what `dataflow_settings.*` gives, checked for names and types."""
    settings = dataflow.Settings
    if not is_dataclass(settings):
        raise ConfigError(f"{dataflow.__name__}.Settings is not a dataclass.", remedy="Decorate it with @dataclass.")
    names = [field.name for field in fields(settings)]
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"Did you mean dataflow_settings.{close[0]}? " if close else ""
            raise ConfigError(
                f"There is no setting 'dataflow_settings.{name}'.",
                remedy=f"{hint}Settings of {dataflow.__name__}: {', '.join(names) or 'none'}.",
            )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), given))
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        hint = config_fields.find(key, settings)
        raise ConfigError(
            f"dataflow_settings.{key}: {str(error).splitlines()[0]}.",
            remedy=f"It takes {config_fields.type_name(hint)}." if hint else "See the dataflow's Settings.",
        ) from error


def _class_in_file(file: Path, class_name: str) -> object:
    if not file.is_file():
        near = difflib.get_close_matches(file.name, [p.name for p in file.absolute().parent.glob("*.py")], n=1)
        hint = f"Did you mean {file.with_name(near[0])}? " if near else ""
        raise ConfigError(
            f"dataflow={file}:{class_name}: there is no file {file}.", remedy=f"{hint}Give file.py:Class."
        )
    spec = importlib.util.spec_from_file_location(f"hybridflow_dataflow_{file.stem}", file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be imported: {type(error).__name__}: {error}.", remedy=f"Try: python {file}"
        ) from error
    if class_name not in vars(module):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__]
        raise ConfigError(
            f"There is no '{class_name}' in {file}.", remedy=f"Classes there: {', '.join(classes) or 'none'}."
        )
    return vars(module)[class_name]
