"""Registers the dataclasses with Hydra."""

from hydra.core.config_store import ConfigStore

from hybridflow.config.experiment import Experiment


def register_schema() -> None:
    """Registers `experiment`, the base of every YAML file."""
    ConfigStore.instance().store(name="experiment", node=Experiment)
