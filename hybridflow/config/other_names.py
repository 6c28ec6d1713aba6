"""Names of settings in other systems, and former names here: for errors, translations and a page of names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from hybridflow.config.fields import find

_TABLE = Path(__file__).resolve().parents[1] / "assets" / "other_names.yaml"
_DEFAULTS = "defaults"
NONE = "none: "
"""Begins the text of a name that has no counterpart; the reason follows."""

VERL = "verl"
_VERL_PREFIX = "actor_rollout_ref."
_PREFIXED = ("actor", "rollout", "ref", "model")
_VERL_SAME = (("reward.custom_reward_function.", "custom_reward_function."), ("reward.reward_model.", "reward_model."))
"""Sections of verl that newer versions have elsewhere."""

_OF_A_CRITIC = (
    ("critic.model.fsdp_config.", "actor.fsdp_config."),
    ("critic.fsdp.", "actor.fsdp_config."),
    ("critic.model.", "model."),
    ("critic.", "actor."),
)
"""Sections of verl's critic, and those with the same names."""

REPLACED: Mapping[str, str] = {
    "algorithm.correction.bypass": "Use algorithm.old_logprobs=rollout, which replaced it (use auto instead of false).",
    "data.drop_long_prompts": "Use data.truncation=drop, which replaced it (use error instead of false).",
    "dataflow_settings.recompute_logprobs": "Use algorithm.old_logprobs=recompute, which replaced it (use auto"
    " instead of false).",
}
"""Replacements of former keys."""


@dataclass(frozen=True)
class OtherName:
    """A setting of another system."""

    name: str
    """Its name, or the section that it is in."""

    here: str
    """The counterpart here, in words; after `none: `, why there is none."""

    values: Mapping[str, str] | None = None
    """The settings here by value: `''` for what happens anyway, `none: WHY` if none is needed, `{}` for the value
    itself. The value `*` stands for all others."""

    by: str = ""
    """The rule that computes the settings from several names."""


@cache
def _table() -> dict[str, dict]:
    return yaml.safe_load(_TABLE.read_text(encoding="utf-8"))


@cache
def other_names() -> Mapping[str, Mapping[str, OtherName]]:
    """By system, its settings; verl's are without `actor_rollout_ref.`."""
    systems = {system: names for system, names in _table().items() if system != _DEFAULTS}
    return {system: {name: _entry(name, said) for name, said in names.items()} for system, names in systems.items()}


def other_defaults(system: str) -> Mapping[str, str]:
    """Values that another system uses unless they are given, if they differ from those here.

    A value that begins with = is that of another setting. Those of TRL are by trainer: `grpo.num_generations`.
    """
    return {name: str(value) for name, value in _table()[_DEFAULTS].get(system, {}).items()}


def plain_value(value: object) -> str:
    """One spelling of a value, to compare it: `True` and `true`, `0.` and `0`."""
    try:
        found = yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError):
        return str(value)
    if isinstance(found, bool) or found is None:
        return {True: "true", False: "false", None: "null"}[found]
    try:
        return f"{float(found):g}" if isinstance(found, int | float | str) else str(found)
    except ValueError:
        return str(found)


def other_name(system: str, name: str) -> OtherName | None:
    """The row of a setting of another system, or of the section that it is in."""
    names = other_names()[system]
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if (found := names.get(".".join(parts[:length]))) is not None:
            return found
    for of_critic, section in _OF_A_CRITIC if system == VERL else ():
        if name.startswith(of_critic) and (found := other_name(system, name.replace(of_critic, section, 1))):
            values = found.values and {value: _of_critic(text) for value, text in found.values.items()}
            return replace(found, name=name, here=_of_critic(found.here), values=values)
    return None


def verl_name(key: str) -> str:
    """A key of verl by the name that it has in the table."""
    name = key.removeprefix(_VERL_PREFIX)
    for long, short in _VERL_SAME:
        name = f"{short}{name.removeprefix(long)}" if name.startswith(long) else name
    return name


def verl_key(name: str) -> str:
    """The key of a name in the table."""
    return f"{_VERL_PREFIX if name.partition('.')[0] in _PREFIXED else ''}{name}"


def is_verl_command(words: Sequence[str]) -> bool:
    """Whether overrides are those of verl, all of whose commands set `actor_rollout_ref.model.path`."""
    return any(isinstance(word, str) and word.lstrip("+").startswith(_VERL_PREFIX) for word in words)


def counterpart(key: str) -> str | None:
    """`Instead of verl's rollout.n, use rollout.samples_per_prompt.` for another system's setting, else None."""
    name = verl_name(key).replace("-", "_")
    if key.startswith(_VERL_PREFIX) and find(name) is not None:
        return f"Instead of verl's {key}, use {name}."
    for system in other_names():
        known = other_name(system, name)
        if known is not None and known.here.startswith(NONE):
            return f"{system}'s {known.name} has no counterpart: {known.here.removeprefix(NONE)}."
        if known is not None:
            return f"Instead of {system}'s {known.name}, use {known.here}."
    return None


def is_other_section(key: str) -> bool:
    """Whether an unknown key is a section of another system, so that the settings in it are meant."""
    if f"{key}.".startswith(_VERL_PREFIX):
        return True
    known = (other for names in other_names().values() for other in names)
    return counterpart(key) is None and any(other.startswith(f"{key}.") for other in known)


def _entry(name: str, said: str | dict) -> OtherName:
    if isinstance(said, str):
        return OtherName(name, said)
    values = said.get("values")
    if values is not None:
        values = {plain_value(value): settings for value, settings in values.items()}
    return OtherName(name, said["here"], values, said.get("by", ""))


def _of_critic(text: str) -> str:
    return text.replace("actor.", "critic.")


def replacement(key: str) -> str | None:
    """The replacement of a former key, whatever section it is written in."""
    last = key.rpartition(".")[2]
    found = [remedy for old, remedy in REPLACED.items() if old.rpartition(".")[2] == last]
    return REPLACED.get(key) or (found[0] if found else None)
