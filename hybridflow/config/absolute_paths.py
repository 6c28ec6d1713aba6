"""Makes the paths in a configuration absolute: workers run in other directories and on other nodes."""

import shlex
from collections.abc import Callable, Iterator
from glob import escape
from pathlib import Path

from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.config.asynchrony import Asynchrony
from hybridflow.config.data import Data
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Trainer
from hybridflow.config.model import Model
from hybridflow.config.paths import PREFIX, is_pattern, user_path
from hybridflow.config.reward import Reward
from hybridflow.config.roles import Role
from hybridflow.config.rollout import Rollout
from hybridflow.config.section import Section, sections_of

_Rule = Callable[[str, str], str]
"""Makes the path in a value absolute; the second argument is the key of the setting."""


def with_absolute_paths(config: Experiment) -> dict[str, object]:
    """Makes the paths in a configuration absolute, in place; returns the previous values by dotted key.

    Changes only paths that exist: anything else is a name on a hub, a built-in, or a mistake, which is reported as the
    user wrote it. `trainer.run_dir` need not exist. Symbolic links are kept: they may differ on other nodes.
    """
    before: dict[str, object] = {}
    for prefix, section in sections_of(config):
        for name, rule in _RULES.get(type(section), {}).items():
            value, key = vars(section)[name], f"{prefix}{name}"
            if isinstance(value, list):
                changed: object = [rule(item, key) for item in value]
            else:
                changed = None if value is None else rule(value, key)
            if changed != value:
                before[key] = value
                setattr(section, name, changed)
    return before


def path_settings(config: Experiment) -> list[str]:
    """Dotted keys of all settings that may contain paths."""
    return [f"{prefix}{name}" for prefix, section in sections_of(config) for name in _RULES.get(type(section), {})]


def is_code(setting: str) -> bool:
    """Whether a setting has the form `path/file.py:name`, with or without a prefix such as `verl:`."""
    path, _, name = setting.rpartition(":")
    return path.endswith(".py") and name.isidentifier()


def written_file(setting: str, *, key: str = "") -> str | None:
    """The file in `path/file.py:name` as written, without a prefix; None for other forms."""
    if not is_code(setting):
        return None
    path = setting.rpartition(":")[0]
    _, colon, rest = path.partition(":")
    return rest if colon and not user_path(path, key=key).is_file() else path


def code_file(setting: str, *, key: str = "") -> Path | None:
    """The file in `path/file.py:name`, optionally after a prefix such as `verl:`; None for other forms."""
    file = written_file(setting, key=key)
    return None if file is None else user_path(file, key=key)


def command_files(command: str) -> list[str]:
    """The files among the words of a command; its program too if it has a directory."""
    try:
        words = shlex.split(command)
    except ValueError:
        return []
    return [word for place, word in enumerate(words) if (place or "/" in word) and Path(word).is_file()]


def model_directories(config: Experiment) -> Iterator[tuple[str, Path]]:
    """Yields each setting that names a local directory with a model or a tokenizer, and that directory."""
    for prefix, section in sections_of(config):
        if isinstance(section, Model):
            for name in _RULES[Model]:
                value = vars(section)[name]
                if value is not None and Path(value).is_absolute():
                    yield f"{prefix}{name}", Path(value)


def _any(text: str, key: str) -> str:
    return str(user_path(text, key=key).absolute())


def _existing(text: str, key: str) -> str:
    path = user_path(text, key=key)
    return str(path.absolute()) if path.exists() else text


def _data(text: str, key: str) -> str:
    if text.startswith(PREFIX):
        return text
    if is_pattern(text) and not user_path(text, key=key).is_absolute():
        return f"{escape(str(Path.cwd()))}/{user_path(text, key=key)}"
    path, mark, options = text.partition("?")
    whole = _existing(text, key)
    return whole if whole != text or not mark else f"{_existing(path, key)}?{options}"


def _resume(text: str, key: str) -> str:
    return text if text in ("auto", "never") else _existing(text, key)


def _code(text: str, key: str) -> str:
    file = code_file(text, key=key)
    if file is None or not file.is_file():
        return text
    path, _, name = text.rpartition(":")
    dialect = "" if user_path(path).is_file() else f"{path.partition(':')[0]}:"
    return f"{dialect}{file.absolute()}:{name}"


def _command(text: str, key: str) -> str:
    files = command_files(text)
    words = shlex.split(text) if files else []
    changed = [_existing(word, key) if word in files else word for word in words]
    return text if changed == words else shlex.join(changed)


_RULES: dict[type[Section], dict[str, _Rule]] = {
    Experiment: {"dataflow": _code},
    Trainer: {"run_dir": _any, "resume": _resume, "device_file": _existing},
    Model: {"path": _existing, "tokenizer_path": _existing},
    Data: {
        "train_files": _data,
        "eval_files": _data,
        "pretraining_files": _data,
        "chat_template": _existing,
        "filters": _code,
        "map": _code,
        "dataset": _code,
    },
    Algorithm: {"advantage": _code, "policy_loss": _code},
    Rollout: {"engine": _code},
    EnvironmentSettings: {"name": _code, "program": _command, "mcp": _command},
    Asynchrony: {"replay": _existing},
    Preference: {"loss": _code},
    Reward: {"functions": _code},
    Role: {"functions": _code},
}
"""All settings that may contain paths, by section."""
