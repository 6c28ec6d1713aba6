"""Sweeps: settings with several values, in Hydra's syntax, become one list of settings per combination."""

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from hybridflow.config.directory import config_directory
from hybridflow.errors import STRICT, ConfigError, Problems
from hybridflow.launch.compose.overrides import GROUPS

_MOST_CHARACTERS = 100
_DIGEST_DIGITS = 8
_AROUND = "[]'\""
_ESCAPED = re.compile(r"\\(.)")
_UNSAFE = re.compile(r"[^\w.+=,@-]+")


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: its name, the values that distinguish it, by key, and all of its settings."""

    name: str
    values: Mapping[str, str]
    settings: tuple[str, ...]


def combinations(
    settings: Sequence[str], problems: Problems = STRICT, *, config_dir: Path | None = None
) -> list[Combination]:
    """One per combination of the values in `key=1,2`, `key=range(...)`, `key=choice(...)` and `algorithm=glob(...)`;
    the last key varies fastest.

    Adds a `ConfigError` for each sweep that is empty, cannot be listed, or has the key of another, and if no setting
    has several values.
    """
    swept: list[str] = []
    choices: list[list[str]] = []
    for text in settings:
        with problems.caught():
            values, key = _values(text, config_dir), text.partition("=")[0]
            if values is not None and key in swept:
                raise ConfigError(f"{key} is swept twice.", remedy=f"Give all of its values at once: {key}=A,B,C,D.")
            swept += [] if values is None else [key]
            choices.append([text] if values is None else [f"{key}={value}" for value in values])
    if not (swept or problems.found):
        problems.add(
            ConfigError(
                "--multirun needs a setting with several values.",
                remedy="Write actor.optimizer.learning_rate=1e-5,1e-4, algorithm=grpo,rloo or 'trainer.seed=range(3)'.",
            )
        )
    names = short_keys(swept)
    found: dict[str, Combination] = {}
    for chosen in itertools.product(*choices):
        texts = (text.partition("=") for text in chosen)
        values = {key: _ESCAPED.sub(r"\1", value) for key, _, value in texts if key in swept}
        name = _name({names[key]: value for key, value in values.items()})
        found.setdefault(name, Combination(name, values, chosen))
    return list(found.values())


def quoted(text: str) -> str:
    """A text as Hydra's grammar reads it, whatever it contains."""
    return QuotedString(text, Quote.single).with_quotes()


def _values(text: str, config_dir: Path | None) -> list[str] | None:
    """The values of a sweep as they would be typed; None for a setting with one value."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        return None  # the composition of the run explains it
    if not override.is_sweep_override():
        return None
    if override.is_interval_sweep():
        raise ConfigError(
            f"'{text}' is a continuous interval, which cannot be listed.",
            remedy=f"Use '{text.partition('=')[0]}=range(START,STOP,STEP)', or list the values.",
        )
    if isinstance(override.value(), Glob):
        return _matching(override, text, config_dir)
    if isinstance(sweep := override.value(), RangeSweep):
        if sweep.step == 0 or not any(True for _ in sweep.range()):
            raise ConfigError(
                f"'{text}' has no values.",
                remedy="Use range(START,STOP,STEP): it ends before STOP, and STEP must lead there from START.",
            )
        steps = [float(f"{float(value):.12g}") for value in sweep.range()]  # without the rounding error of their sum
        return [f"{step:.12g}" for step in steps if step != sweep.stop]
    return list(map(str, override.sweep_string_iterator()))


def _matching(override: Override, text: str, config_dir: Path | None) -> list[str]:
    """The names of a group's files that a pattern matches."""
    group, pattern = override.key_or_group, override.value()
    assert isinstance(pattern, Glob), f"{text} is not a pattern"
    if group not in GROUPS:
        raise ConfigError(
            f"'{text}': glob(...) chooses among the names of {' or '.join(GROUPS)}.",
            remedy=f"List the values: {group}=FIRST,SECOND.",
        )
    folders = [config_directory(), *([] if config_dir is None else [config_dir])]
    names = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
    if not (found := pattern.filter(names)):
        raise ConfigError(f"'{text}' matches no {group}.", remedy=f"Choose from: {', '.join(names)}.")
    return found


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The shortest ends of the keys that differ: `learning_rate`, or `actor.optimizer.learning_rate`."""
    found = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        others = [other for other in keys if other != key]
        found[key] = next(end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others))
    return found


def _name(values: Mapping[str, str]) -> str:
    """A directory's name, such as `algorithm=grpo,learning_rate=1e-5`; with a digest if it had to be changed."""
    whole = ",".join(f"{key}={value.strip(_AROUND)}" for key, value in values.items())
    safe = _UNSAFE.sub("_", whole)[:_MOST_CHARACTERS]
    return safe if safe == whole else f"{safe}-{hashlib.sha256(whole.encode()).hexdigest()[:_DIGEST_DIGITS]}"
