"""Paths as users write them, and the files that come with the package."""

from pathlib import Path

from hybridflow.config.nearest import did_you_mean
from hybridflow.errors import ConfigError

_LONGEST_BYTES = 4095
_LONGEST_NAME_BYTES = 255


def user_path(text: str, *, key: str = "") -> Path:
    """The path that a user wrote, with `~` expanded. It need not exist. `key` is the setting, for errors.

    Raises `ConfigError` for an unknown user after `~`, a NUL character, and names or paths longer than Linux allows.
    """
    shown = f"{key}={_shown(text)}" if key else f"'{_shown(text)}'"
    if "\0" in text:
        raise ConfigError(f"{shown} contains a NUL character.", remedy="Remove control characters from the path.")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{shown}: there is no user '{Path(text).parts[0].removeprefix('~')}' on this machine.",
            remedy="Write the full path; write a directory whose name starts with ~ as ./~name.",
        ) from error
    size = len(str(path).encode(errors="surrogateescape"))
    longest = max((len(part.encode(errors="surrogateescape")) for part in path.parts), default=0)
    if size > _LONGEST_BYTES or longest > _LONGEST_NAME_BYTES:
        raise ConfigError(
            f"{shown} is too long for a path: it has {size} bytes, and {longest} in one name.",
            remedy=f"Use at most {_LONGEST_NAME_BYTES} bytes per name and {_LONGEST_BYTES} in total.",
        )
    return path


def is_storage_url(text: str) -> bool:
    """Whether a text has the form of a URL of storage: a protocol and a place."""
    protocol, _, place = text.partition("://")
    return bool(protocol and place.strip("/"))


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}...{text[-20:]}"


def is_pattern(text: str) -> bool:
    """Whether a source is a pattern for several files, such as `data/part-*.parquet`, and no file's own name."""
    path = text.partition("?")[0]
    return any(sign in path for sign in "*[") and not user_path(text).exists()


PREFIX = "builtin:"
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_PATHS = {
    "calculator": "calculator/model",
    "calculator/train": "calculator/train.jsonl",
    "calculator/eval": "calculator/eval.jsonl",
    "calculator/pairs": "calculator/pairs.jsonl",
    "calculator/eval_pairs": "calculator/eval_pairs.jsonl",
    "games": "games/model",
    "games/guess_number": "games/guess_number.jsonl",
    "games/calculator": "games/calculator.jsonl",
    "games/calculator_eval": "games/calculator_eval.jsonl",
    "games/frozen_lake": "games/frozen_lake.jsonl",
    "games/kuhn_poker": "games/kuhn_poker.jsonl",
}


def builtin_path(name: str) -> Path:
    """The path of `builtin:calculator` (a model directory), `builtin:calculator/train` (a JSONL file) and the like."""
    known = _PATHS.get(name.removeprefix(PREFIX))
    if known is None:
        choices = [PREFIX + choice for choice in _PATHS]
        raise ConfigError(
            f"There is no built-in '{name}'.", remedy=f"{did_you_mean(name, choices)}Choose from: {', '.join(choices)}."
        )
    return _ASSETS / known
