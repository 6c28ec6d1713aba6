"""Which settings may change when a run is resumed, and which would make the checkpoint mean something else."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridflow.config.absolute_paths import is_code, written_file
from hybridflow.config.loop import ResumeChanged
from hybridflow.elastic.fingerprints import Fingerprints
from hybridflow.errors import CheckpointError

FIXED = (
    "model.path",
    "model.tokenizer_path",
    "model.pad_token",
    "actor.model.path",
    "critic.model.path",
    "actor.lora.rank",
    "actor.lora.alpha",
    "actor.lora.targets",
    "critic.lora.rank",
    "critic.lora.alpha",
    "critic.lora.targets",
    "dataflow",
    "algorithm.advantage",
    "data.train_files",
    "data.batch_size",
    "data.shuffle",
    "data.mixture",
    "data.difficulty_key",
    "data.curriculum_steps",
    "data.pretraining_files",
    "data.max_prompt_tokens",
    "data.drop_long_prompts",
    "data.prompt_key",
    "data.answer_key",
    "trainer.seed",
)
"""Settings on which the saved weights, data position or random states depend."""

_INPUTS = re.compile(
    r"data\.(filters|max_rows|chat_template|system_prompt|as_chat)"
    r"|reward\.(functions|process|model\.(path|tokenizer_path|pad_token))"
    r"|roles\..+\.(kind|functions|process|model\.(path|tokenizer_path|pad_token))"
)
"""Settings that choose which rows, prompts and rewards a run has: they may change where files may."""

_DIRECTORIES = re.compile(r"\A(?P<prefix>(\w+:)?)[^:?]*/")
"""What a path begins with, after a prefix such as `verl:` and before options such as `?split=train`."""


@dataclass(frozen=True)
class Change:
    """A setting that is not what it was."""

    key: str
    saved: object
    now: object

    @property
    def is_of_inputs(self) -> bool:
        """Whether the setting chooses inputs: rows, prompts, rewards, or code in a file (`path/file.py:name`)."""
        named = any(isinstance(word, str) and is_code(word) for word in words_of(self.saved) + words_of(self.now))
        return named or _INPUTS.fullmatch(self.key) is not None

    def __str__(self) -> str:
        return f"{self.key} was {self.saved!r} and is {self.now!r}"


def words_of(value: object) -> list[object]:
    """The values of a setting: those of a list, or the one that it has."""
    return value if isinstance(value, list) else [value]


def flat(config: Mapping[str, object]) -> dict[str, object]:
    """A nested configuration by dotted keys; lists are values, and so is an empty section."""
    out: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= {f"{key}.{inner}": found for inner, found in flat(value).items()}
        else:
            out[key] = value
    return out


def compare(saved: Mapping[str, object], now: Mapping[str, object]) -> list[Change]:
    """The settings that differ between two nested configurations; one that is absent counts as None."""
    before, after = flat(saved), flat(now)
    keys = sorted(before.keys() | after.keys())
    return [Change(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def with_moves_undone(
    saved: Mapping[str, object],
    now: Mapping[str, object],
    paths: Iterable[str],
    before: Fingerprints,
    after: Fingerprints,
) -> dict[str, object]:
    """The present settings by dotted keys, with the saved value where only directories differ.

    `paths` are the keys of settings that may hold paths. In these, each name must be the same in the same position,
    and the fingerprints of its files, `before` and `after`, must be known and equal.
    """
    was, settings = flat(saved), flat(now)
    for key in paths:
        old, new = words_of(was.get(key)), words_of(settings.get(key))
        if len(old) == len(new) and all(_is_moved(*pair, before, after) for pair in zip(old, new, strict=True)):
            settings[key] = was.get(key)
    return settings


def _is_moved(old: object, new: object, before: Fingerprints, after: Fingerprints) -> bool:
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return old == new
    files = before.get(written_file(old) or old)
    return _name(old) == _name(new) and bool(files) and files == after.get(written_file(new) or new)


def _name(path: str) -> str:
    return _DIRECTORIES.sub(r"\g<prefix>", path.rstrip("/"), count=1)


def check_compatible(
    saved: Mapping[str, object], now: Mapping[str, object], policy: ResumeChanged = ResumeChanged.refuse
) -> list[Change]:
    """The settings that changed since a checkpoint was written.

    Raises `CheckpointError` if one of `FIXED` did, or one that chooses inputs, unless `trainer.resume_changed=accept`.
    """
    # A setting that the checkpoint does not know yet, and that is still empty, is as it was.
    changes = [change for change in compare(saved, now) if change.saved or change.now]
    if fixed := [change for change in changes if change.key in FIXED]:
        raise CheckpointError(
            f"The checkpoint was made with other settings: {'; '.join(map(str, fixed))}.",
            remedy="Set them back to resume, or start over with trainer.resume=never (the old run is set aside);"
            " model.path may then be the checkpoint's actor/huggingface.",
        )
    inputs = [change for change in changes if change.is_of_inputs]
    if inputs and policy is ResumeChanged.refuse:
        raise CheckpointError(
            f"The checkpoint was made with other inputs: {'; '.join(map(str, inputs))}.",
            remedy="Set them back to resume, resume with the present ones (trainer.resume_changed=accept), or start"
            " over (trainer.resume=never).",
        )
    return changes
