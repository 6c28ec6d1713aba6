"""Names of settings in other systems and former names here: for errors, and for the reference page of names."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from hybridflow.config.fields import find

_TABLE = Path(__file__).resolve().parents[1] / "assets" / "other_names.yaml"
_NONE = "none: "
_VERL_PREFIX = "actor_rollout_ref."

REPLACED: Mapping[str, str] = {
    "algorithm.correction.bypass": "Use algorithm.old_logprobs=rollout, which replaced it (use auto instead of false).",
    "data.drop_long_prompts": "Use data.truncation=drop, which replaced it (use error instead of false).",
    "dataflow_settings.recompute_logprobs": "Use algorithm.old_logprobs=recompute, which replaced it (use auto"
    " instead of false).",
}
"""Replacements of former keys."""


@cache
def other_names() -> Mapping[str, Mapping[str, str]]:
    """By system, the setting to use here for each of its settings; verl's are without `actor_rollout_ref.`."""
    return yaml.safe_load(_TABLE.read_text(encoding="utf-8"))


def counterpart(key: str) -> str | None:
    """`Instead of verl's rollout.n, use rollout.samples_per_prompt.` for another system's setting, else None."""
    name = key.removeprefix(_VERL_PREFIX).replace("-", "_")
    if key.startswith(_VERL_PREFIX) and find(name) is not None:
        return f"Instead of verl's {key}, use {name}."
    for system, names in other_names().items():
        known = next((other for other in names if name == other or name.startswith(f"{other}.")), None)
        if known is not None and names[known].startswith(_NONE):
            return f"{system}'s {known} has no counterpart: {names[known].removeprefix(_NONE)}."
        if known is not None:
            return f"Instead of {system}'s {known}, use {names[known]}."
    return None


def is_other_section(key: str) -> bool:
    """Whether an unknown key is a section of another system, so that the settings in it are meant."""
    if f"{key}.".startswith(_VERL_PREFIX):
        return True
    known = (other for names in other_names().values() for other in names)
    return counterpart(key) is None and any(other.startswith(f"{key}.") for other in known)


def replacement(key: str) -> str | None:
    """The replacement of a former key, whatever section it is written in."""
    last = key.rpartition(".")[2]
    found = [remedy for old, remedy in REPLACED.items() if old.rpartition(".")[2] == last]
    return REPLACED.get(key) or (found[0] if found else None)
