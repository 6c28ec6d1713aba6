"""Registers the dataclasses with Hydra, and finds the package's YAML files."""

from importlib.resources import files
from pathlib import Path

from hydra.core.config_store import ConfigStore

from hybridflow.config.experiment import Experiment
from hybridflow.errors import ConfigError


def register_schema() -> None:
    """Registers `experiment`, the base of every YAML file."""
    ConfigStore.instance().store(name="experiment", node=Experiment)


def config_directory() -> Path:
    """The directory `trainer_configs/`: in the package if installed from a wheel, next to it in a checkout."""
    package = Path(str(files("hybridflow")))
    for candidate in (package / "trainer_configs", package.parent / "trainer_configs"):
        if (candidate / "ppo.yaml").is_file():
            return candidate
    raise ConfigError(
        f"There is no trainer_configs/ in or next to {package}.",
        remedy="Reinstall hybridflow; in a checkout: pip install .",
    )
