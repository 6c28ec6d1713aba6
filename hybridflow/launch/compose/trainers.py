"""The training commands: `hybridflow ppo`, `hybridflow grpo`, and the files of settings that they start from."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.algorithms.catalogue import PREFERENCE_LOSSES
from hybridflow.config.choices import PREFERENCE_SYNONYMS
from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.presets import plain_name, preset_name, presets

RUN = "run"
"""The command that runs a run file by the trainer that the file names."""

SUFFIXES = (".yaml", ".yml")
"""Those of run files."""

JOBS = ("local", "ray")
"""Where the runs of a sweep are executed: one after another on this machine, or as jobs of a Ray cluster."""

OPTIONS = ("--help", "--dry-run", "--multirun", "--jobs", "--cfg", "--config-name", "--config-dir")
"""The options of a training command."""

PURPOSES: Mapping[str, str] = {
    "ppo": "Trains a language model by reinforcement learning: PPO, GRPO or a dataflow of your own.",
    "sft": "Trains a language model on demonstrations (supervised fine-tuning).",
    "dpo": "Trains a language model on pairs of responses (DPO; also IPO, SLiC, ORPO, SimPO).",
    "kto": "Trains a language model on single responses that people like or do not (KTO).",
    "reward_model": "Trains a reward model on pairs of which one response is preferred.",
}
"""The purpose of each trainer, by the name of its configuration."""


@dataclass(frozen=True)
class TrainingCommand:
    """The trainer behind a command, and the settings that the command implies, as they would be typed."""

    trainer: str
    """The name of its configuration: `reward_model` for `hybridflow reward-model`."""

    overrides: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The word that names it on the command line: `grpo`, `reward-model`."""
        return self.overrides[-1].partition("=")[2] if self.overrides else shown_name(self.trainer)


def find_command(word: str) -> TrainingCommand | None:
    """The command of a word: a trainer, an algorithm (`grpo`), or a preference loss (`ipo`)."""
    name = word.replace("-", "_")
    if name in PURPOSES:
        return TrainingCommand(name)
    if preset_name(name) in presets():
        return TrainingCommand("ppo", (f"algorithm={preset_name(name)}",))
    if name in PREFERENCE_LOSSES or name in PREFERENCE_SYNONYMS:
        return TrainingCommand("dpo", (f"algorithm.preference.loss={name}",))
    return None


def known_command(word: str) -> TrainingCommand:
    """The same; raises `ConfigError` for any other word."""
    if (found := find_command(word)) is not None:
        return found
    raise ConfigError(
        f"There is no trainer or algorithm '{word}'.",
        remedy=f"{did_you_mean(plain_name(word), command_words())}Choose from: {', '.join(command_words())}.",
    )


def command_of_dataflow(name: str) -> TrainingCommand:
    """The command that runs a dataflow; one without its own is a program over the roles of PPO."""
    return find_command(name) or TrainingCommand("ppo", (f"dataflow={name}",))


def command_words() -> list[str]:
    """The words of all training commands: the trainers, then the algorithms and the losses."""
    trainers = [shown_name(name) for name in PURPOSES]
    return list(dict.fromkeys([*trainers, *presets(), *PREFERENCE_LOSSES]))


def is_run_file(word: str) -> bool:
    """Whether a word of the command line names a run file, whose path may contain an `=`."""
    return Path(word).suffix in SUFFIXES and ("=" not in word or Path(word).is_file())


def shown_name(trainer: str) -> str:
    """The word of a trainer's command."""
    return trainer.replace("_", "-")
