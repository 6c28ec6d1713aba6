"""Finds the commands of other systems in words or scripts, and translates them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hybridflow.config.other_names import is_verl_command
from hybridflow.errors import ConfigError
from hybridflow.launch.compose.other_systems.openrlhf import OPENRLHF_TRAINERS, openrlhf_translation
from hybridflow.launch.compose.other_systems.shell import commands
from hybridflow.launch.compose.other_systems.translation import Missing, Translation, options_of
from hybridflow.launch.compose.other_systems.trl import TRL_TRAINERS, trl_translation
from hybridflow.launch.compose.other_systems.verl import verl_translation
from hybridflow.launch.compose.presets import preset_name, presets
from hybridflow.launch.compose.trainers import TrainingCommand, find_command, shown_name

_VERL = re.compile(r"(?:.*[./])?main_(?:ppo|dapo)(?:\.py)?")
_OPENRLHF = re.compile(r"(?:.*[./])?train_(\w+?)(?:_ray)?(?:\.py)?")
_SCRIPT = re.compile(r"(?:trl\.scripts\.|(?=.*\.py$)(?:.*/)?)([a-z]+)(?:_\w+)?(?:\.py)?")
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
_CONFIG_OPTIONS = ("--config-name", "--config-path")
_UNSUPPORTED = re.compile(r"(?:.*[./])?(?:verl[./]trainer[./]\w+(?:\.py)?|openrlhf[./]cli[./]train_\w+(?:\.py)?)")
_SUPPORTED = (
    "hybridflow translate reads verl.trainer.main_ppo (and main_dapo); trl {trl}; openrlhf.cli.train_{openrlhf}."
)
_OWN = "hybridflow --help lists the commands here."
_KNOWN = (
    "Give a script, or a command of verl (python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ...), of TRL"
    " (trl grpo --model_name_or_path ...) or of OpenRLHF (python3 -m openrlhf.cli.train_ppo_ray --pretrain ...)."
)


@dataclass(frozen=True)
class TranslatedCommand:
    """A command of another system, and what it is here."""

    system: str
    trainer: str
    """The name of the configuration that the command here starts from."""

    found: Translation

    @property
    def word(self) -> str:
        """The word of the command here, such as `grpo`."""
        return self._algorithm or shown_name(self.trainer)

    def overrides(self) -> list[str]:
        """The settings of the command here, without the one that its word implies."""
        return [word for word in self.found.words() if word != f"algorithm={self._algorithm}"]

    @property
    def _algorithm(self) -> str | None:
        name = self.found.settings.get("algorithm")
        return name if name is not None and preset_name(name) in presets() else None


def translated_text(text: str, environment: Mapping[str, str]) -> list[TranslatedCommand]:
    """The commands of other systems in a script, with the environment's variables.

    Raises `ConfigError` if there is none.
    """
    lines = re.sub(r"^\+ ", "", text, flags=re.MULTILINE)  # as bash -x prints them
    found = [translated_words(words) for words in commands(lines, environment) if _system(words)]
    if not found:
        raise _no_command(text)
    return found


def translated_words(words: Sequence[str]) -> TranslatedCommand:
    """The command of another system that a shell has read. Raises `ConfigError` for any other."""
    words = [word for word in words if word]
    place = _system(words)
    if place is None:
        raise _no_command(" ".join(words))
    system, begin = place
    if system == "verl":
        return TranslatedCommand(system, "ppo", verl_words(words[begin:]))
    launch, (name, rest) = words[:begin], (words[begin - 1], words[begin:])
    if system == "TRL":
        trainer = _named(name, _SCRIPT, TRL_TRAINERS)
        command = _command(TRL_TRAINERS[trainer])
        found = trl_translation(trainer, options_of(rest), _launch_options(launch))
        return TranslatedCommand(system, command.trainer, found)
    trainer = _named(name, _OPENRLHF, OPENRLHF_TRAINERS)
    command = _command(OPENRLHF_TRAINERS[trainer])
    return TranslatedCommand(system, command.trainer, openrlhf_translation(trainer, options_of(rest), launch))


def verl_words(words: Sequence[str]) -> Translation:
    """Translates the overrides of `verl.trainer.main_ppo`; `--config-name` may choose that of Megatron."""
    given, unread, words = {}, [], _with_values(words)
    parts = (word.partition("=") for word in words if word.startswith(_CONFIG_OPTIONS))
    options = {name: value for name, _, value in parts}
    config = options.get("--config-name", "ppo_trainer").removesuffix(".yaml")
    if "megatron" in config:
        given["model_engine"] = "megatron"
    if config not in _CONFIGS:
        unread.append(Missing(f"--config-name={config}", "settings in files of your own are not translated"))
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith("~"):
            unread.append(Missing(word, "settings cannot be removed; give the value instead"))
        elif equals and not key.startswith(("-", "hydra.")):
            given[key.lstrip("+")] = value
    found = verl_translation(given)
    return Translation(found.settings, found.shown, found.not_needed, [*unread, *found.missing])


def from_verl(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of `verl.trainer.main_ppo` as those of `main_ppo` here, and what became what, one line each.

    Raises `ConfigError` for settings that change the results and have no counterpart.
    """
    found = verl_words(words)
    if found.missing:
        said = "".join(f"\n  {missing.name}: {missing.reason}" for missing in found.missing)
        raise ConfigError(
            f"These settings of verl are not translated:{said}",
            remedy="Replace each by the setting here that it names, or leave it out. hybridflow translate prints the"
            " other settings.",
        )
    lines = [f"{theirs} -> {here}" for theirs, here in found.shown]
    lines += [f"{', '.join(each.names)} has no effect: {each.reason}" for each in found.not_needed]
    others = [word for word in _with_values(words) if word.startswith("-") or "=" not in word]
    return [*(word for word in others if not word.startswith(_CONFIG_OPTIONS)), *found.words()], lines


def _with_values(words: Sequence[str]) -> list[str]:
    """The words, with `--config-name NAME` as one."""
    found: list[str] = []
    for word in words:
        if found and found[-1] in _CONFIG_OPTIONS:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _system(words: Sequence[str]) -> tuple[str, int] | None:
    """The system of a command, and the position of its first argument."""
    for number, word in enumerate(words, 1):
        if word == "trl" and number < len(words) and words[number] in TRL_TRAINERS:
            return "TRL", number + 1
        if _VERL.fullmatch(word) and not word.startswith("hybridflow."):
            return "verl", number
        name = _OPENRLHF.fullmatch(word)
        if name and name[1] in OPENRLHF_TRAINERS:
            return "OpenRLHF", number
        script = _SCRIPT.fullmatch(word)
        if script and script[1] in TRL_TRAINERS and any(option.startswith("--") for option in words[number:]):
            return "TRL", number
    return ("verl", 0) if is_verl_command(words) else None


def _named(word: str, pattern: re.Pattern[str], trainers: Mapping[str, str]) -> str:
    found = pattern.fullmatch(word)
    return found[1] if found and found[1] in trainers else word


def _command(word: str) -> TrainingCommand:
    found = find_command(word)
    assert found is not None, f"{word} must be a command"
    return found


def _launch_options(words: Sequence[str]) -> dict[str, str]:
    """Those of a launcher, each of which has one value."""
    return {name: value.partition(",")[0] for name, value in options_of(words).items()}


def _no_command(text: str) -> ConfigError:
    words = text.split()
    programs = [word for word in words if _UNSUPPORTED.fullmatch(word) and _system([word]) is None]
    programs += [
        f"trl {word}"
        for before, word in pairwise(words)
        if before == "trl" and word.isalpha() and word not in TRL_TRAINERS
    ]
    if programs:
        known = _SUPPORTED.format(trl=", ".join(TRL_TRAINERS), openrlhf=", train_".join(OPENRLHF_TRAINERS))
        return ConfigError(f"{programs[0]} is not supported.", remedy=f"{known} {_OWN}")
    shown = " ".join(words)
    shown = f"'{shown[:80]}{'...' if len(shown) > 80 else ''}'" if shown else "The input"
    return ConfigError(f"{shown} has no command of verl, TRL or OpenRLHF.", remedy=_KNOWN)
