"""After composition nothing changes any more."""

from dataclasses import fields, is_dataclass

from hybridflow.config.experiment import Experiment
from hybridflow.config.section import Section


def sealed(config: Experiment) -> Experiment:
    """The same configuration; assigning to any of its fields raises `ConfigError` from now on."""
    _seal(config)
    return config


def _seal(value: object) -> None:
    if isinstance(value, Section) and is_dataclass(value):
        for field in fields(value):
            _seal(getattr(value, field.name))
        object.__setattr__(value, "_sealed", True)
    elif isinstance(value, dict):
        for item in value.values():
            _seal(item)
