"""The presets that `algorithm=NAME` selects, read from the files installed with the package."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from hybridflow.config.choices import ADVANTAGE_SYNONYMS, POLICY_LOSS_SYNONYMS
from hybridflow.config.directory import config_directory
from hybridflow.config.section import leaves

GROUPS = ("algorithm", "task")
"""Keys that choose a set of settings, from the files in a directory of that name."""

SYNONYMS: Mapping[str, str] = {**ADVANTAGE_SYNONYMS, **POLICY_LOSS_SYNONYMS, "gae": "ppo"}
"""Other names of a preset: those of the estimator or the loss that it selects."""

_OF_A_CLASS = re.compile(r"(?<=\w)(?:Trainer|Config)$")
"""Ends of the classes of other systems that are named after a method."""


@dataclass(frozen=True)
class Preset:
    """One file of `trainer_configs/algorithm/`: its comment, and the settings it gives."""

    name: str
    about: str
    """The first sentence of its comment."""

    settings: Mapping[str, object]

    def get(self, *path: str) -> object:
        """One of its settings; None if it does not set it."""
        found: object = self.settings
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    @property
    def num_settings(self) -> int:
        """The number of settings it gives."""
        return sum(1 for _ in leaves(self.settings))


def presets() -> Mapping[str, Preset]:
    """All of them by name."""
    return _presets_in(config_directory())


@cache
def _presets_in(directory: Path) -> Mapping[str, Preset]:
    files = sorted((directory / "algorithm").glob("*.yaml"))
    return {file.stem: Preset(file.stem, _about(file), yaml.safe_load(file.read_text()) or {}) for file in files}


def preset_name(name: str) -> str:
    """The preset behind a synonym; any other name is itself."""
    return SYNONYMS.get(name, name)


def plain_name(name: str) -> str:
    """A method's name as it is written here: `grpo` for `GRPO` and for TRL's `GRPOTrainer` and `GRPOConfig`."""
    return _OF_A_CLASS.sub("", name).lower().replace("-", "_")


def default_choices(config_name: str) -> dict[str, str]:
    """The default choice of a built-in configuration in each group, as in `{"algorithm": "ppo", "task": ...}`."""
    file = config_directory() / f"{config_name}.yaml"
    content = yaml.safe_load(file.read_text()) if file.is_file() else {}
    choices = [choice for choice in content.get("defaults", []) if isinstance(choice, dict)]
    return {group: name for choice in choices for group, name in choice.items()}


def _about(file: Path) -> str:
    comment = []
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        words = line.lstrip("# ").strip()
        comment += [] if words.startswith("@package") else [words]
    return re.split(r"(?<=[.])(?<!\bDr[.]) (?=[A-Z])", " ".join(comment), maxsplit=1)[0]
