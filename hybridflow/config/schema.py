"""Hands the dataclasses to Hydra, and finds the YAML files that come with the package."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from hydra.core.config_store import ConfigStore

from hybridflow.config.experiment import Experiment
from hybridflow.config.roles import Role
from hybridflow.errors import ConfigError

SCHEMA_NAME = "experiment"


def register_schema(roles: Mapping[str, Role]) -> None:
    """Makes `experiment` known to Hydra: what every YAML file starts from, with the roles of a dataflow's class."""
    ConfigStore.instance().store(name=SCHEMA_NAME, node=Experiment(roles=dict(roles)))


def config_directory() -> Path:
    """`trainer_configs/`, in the wheel or beside the package in a checkout."""
    package = Path(str(files("hybridflow")))
    for candidate in (package / "trainer_configs", package.parent / "trainer_configs"):
        if (candidate / "ppo.yaml").is_file():
            return candidate
    raise ConfigError(
        f"No trainer_configs/ in or beside {package}.", remedy="Install hybridflow again, in a checkout: pip install ."
    )
