"""Which settings and files may change when a run is resumed, and which must match the checkpoint."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.absolute_paths import is_code, written_file
from hybridflow.config.loop import ResumeChanged
from hybridflow.config.paths import user_path
from hybridflow.config.stored_inputs import STORED
from hybridflow.errors import CheckpointError, raised_together

Fingerprints = Mapping[str, Mapping[str, str]]
"""Digests by source and by file in it (the empty name for a source that is a single file).

A source is a file, directory or dataset as a setting writes it, or `module NAME` for a module of the user's.
"""

FIXED = re.compile(
    r"model\.(path|tokenizer_path|pad_token)|(actor|critic)\.(model\.path|lora\.(rank|alpha|targets))"
    r"|data\.(train_files|batch_size|shuffle|streaming|mixture|difficulty_key|curriculum_steps|pretraining_files)"
    r"|data\.(max_prompt_tokens|truncation|prompt_key|answer_key)"
    r"|dataflow|algorithm\.advantage|trainer\.seed"
)
"""Settings on which the saved weights, data position or random states depend."""

_INPUTS = re.compile(
    r"data\.(map|dataset|prompt_template|filters|max_rows|chat_template|system_prompt|as_chat)"
    r"|environment\.(name|program|mcp|credit|settings\..+)"
    r"|reward\.(functions|process|model\.(path|tokenizer_path|pad_token))"
    r"|roles\..+\.(kind|functions|process|model\.(path|tokenizer_path|pad_token))"
)
"""Settings that determine the rows, prompts and rewards of a run; they may change only if file contents may."""

_DIRECTORIES = re.compile(r"\A(?P<prefix>(\w+:)?)[^:?]*/")
"""The directories of a path, after a prefix such as `verl:` and before options such as `?split=train`."""

_ACCEPT = "accept the changes (trainer.resume_changed=accept), or start over (trainer.resume=never)."

_WHOLE_BYTES = 4 << 30
_BLOCK_BYTES = 64 << 10
_BLOCKS = 4096


@dataclass(frozen=True)
class Change:
    """A setting that differs from the checkpoint's."""

    key: str
    saved: object
    now: object

    @property
    def is_of_inputs(self) -> bool:
        """Whether the setting chooses inputs: rows, prompts, rewards, or code in a file (`path/file.py:name`)."""
        words = words_of(self.saved) + words_of(self.now)
        return _INPUTS.fullmatch(self.key) is not None or any(isinstance(word, str) and is_code(word) for word in words)

    @property
    def is_of_objects(self) -> bool:
        """Whether both values are objects that were given from Python, which are stored in the run's directory."""
        return all(isinstance(value, str) and STORED.fullmatch(value) for value in (self.saved, self.now))

    @property
    def functions(self) -> list[tuple[str, str]]:
        """The stored copies, then and now, of functions given from Python that have changed; empty if anything else in
        the value differs."""
        saved, now = words_of(self.saved), words_of(self.now)
        pairs = [(str(was), str(word)) for was, word in zip(saved, now, strict=False) if was != word]
        are_copies = all(is_code(word) and STORED.fullmatch(word) for pair in pairs for word in pair)
        return pairs if len(saved) == len(now) and are_copies and _names(saved) == _names(now) else []

    def __str__(self) -> str:
        return f"{self.key} was {self.saved!r} and is {self.now!r}"


def _place_of(copy: str) -> str:
    """The file and line of a function, as the first line of its stored copy has them; otherwise the copy itself."""
    path, _, name = copy.rpartition(":")
    with suppress(OSError, UnicodeDecodeError), user_path(path).open(encoding="utf-8") as file:
        written, _, place = file.readline().strip().removeprefix("# ").partition(": ")
        if written == name:
            return place
    return path


def words_of(value: object) -> list[object]:
    """The values of a setting: the items of a list, or the single value."""
    return value if isinstance(value, list) else [value]


def flat(config: Mapping[str, object]) -> dict[str, object]:
    """A nested configuration by dotted keys. Lists and empty sections are values."""
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
    """The present settings by dotted keys, with the saved value if only directories differ.

    `paths` are the keys of settings that may hold paths. A path counts as moved if its last component is the same, at
    the same position, and the fingerprints of its files, `before` and `after`, are known and equal.
    """
    was, settings = flat(saved), flat(now)
    for key in paths:
        old, new = words_of(was.get(key)), words_of(settings.get(key))
        if len(old) == len(new) and all(_is_moved(*pair, before, after) for pair in zip(old, new, strict=True)):
            settings[key] = was.get(key)
    return settings


def _is_moved(old: object, new: object, before: Fingerprints, after: Fingerprints) -> bool:
    """Whether two values, or the words of two commands, differ only by the directories of known and equal files."""
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return old == new
    files, words = before.get(written_file(old) or old), (old.split(), new.split())
    if _names(old) == _names(new) and files and files == after.get(written_file(new) or new):
        return True
    is_command = 1 < len(words[0]) == len(words[1])
    return is_command and all(_is_moved(*pair, before, after) for pair in zip(*words, strict=True))


def is_other_run(saved: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Whether `FIXED` settings differ by more than directories, so that the run does not resume from the checkpoint."""
    changes = (change for change in compare(saved, now) if FIXED.fullmatch(change.key) and (change.saved or change.now))
    return any(_names(change.saved) != _names(change.now) for change in changes)


def _names(value: object) -> list[object]:
    """The values of a setting, paths without their directories."""
    return [
        _DIRECTORIES.sub(r"\g<prefix>", word.rstrip("/"), count=1) if isinstance(word, str) else word
        for word in words_of(value)
    ]


def check_compatible(
    saved: Mapping[str, object], now: Mapping[str, object], policy: ResumeChanged = ResumeChanged.refuse
) -> list[Change]:
    """The settings that changed since a checkpoint was written.

    Raises `CheckpointError` if a `FIXED` setting changed, or one that chooses inputs and `policy` is to refuse that.
    """
    # A setting that the checkpoint does not have yet counts as unchanged while it is empty.
    changes = [change for change in compare(saved, now) if change.saved or change.now]
    fixed = [change for change in changes if FIXED.fullmatch(change.key) and not change.functions]
    inputs = [change for change in changes if change.is_of_inputs and change not in fixed and not change.functions]
    with raised_together() as faults:
        if fixed:
            said = f"The checkpoint was written with other settings: {'; '.join(map(str, fixed))}."
            remedy = "Restore them to resume, or start over with trainer.resume=never (the old run is renamed);"
            remedy += " model.path may then be the checkpoint's actor/huggingface."
            if any(change.key.endswith("model.path") and change.is_of_objects for change in fixed):
                remedy += " A model with random weights has other weights each time it is made: call torch.manual_seed"
                remedy += " before."
            faults.add(CheckpointError(said, remedy=remedy))
        if inputs and policy is ResumeChanged.refuse:
            said = f"The checkpoint was written with other inputs: {'; '.join(map(str, inputs))}."
            faults.add(CheckpointError(said, remedy=f"Restore them to resume, {_ACCEPT}"))
        if policy is ResumeChanged.refuse:
            faults.add(*(_changed_function(change.key, *copies) for change in changes for copies in change.functions))
    return changes


def _changed_function(key: str, then: str, now: str) -> CheckpointError:
    name, copy = now.rpartition(":")[2], then.rpartition(":")[0]
    return CheckpointError(
        f"{key}: '{name}' ({_place_of(now)}) has changed since the checkpoint was written: its code, a value that it"
        " refers to, or the version of Python.",
        remedy=f"Restore it to resume (its earlier source is in {copy}), {_ACCEPT}",
    )


def file_fingerprint(path: Path) -> str:
    """A digest of a file's contents.

    Files of up to 4 GiB are hashed whole. For a larger file, the digest covers its size, its time of modification and
    4,096 blocks of 64 KiB, evenly spaced from its start to its end.
    """
    with path.open("rb") as file:
        known = os.fstat(file.fileno())
        if known.st_size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{known.st_size} {known.st_mtime_ns}".encode())
        last = max(0, known.st_size - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
    return f"sampled:{digest.hexdigest()}"


def check_unchanged(saved: Fingerprints, now: Fingerprints, policy: ResumeChanged) -> list[str]:
    """The files whose contents have changed since a checkpoint was written.

    Raises a `CheckpointError` that names them, unless `policy` accepts changes. Ignores sources that only one side has:
    there a setting has changed (see `check_compatible`), or what a module imports.
    """
    changed = [
        os.path.join(source, file) if file else source
        for source in saved.keys() & now.keys()
        for file in saved[source].keys() | now[source].keys()
        if saved[source].get(file) != now[source].get(file)
    ]
    changed.sort()
    if changed and policy is ResumeChanged.refuse:
        raise CheckpointError(
            f"These files have changed since the checkpoint was written: {', '.join(changed)}.",
            remedy=f"Restore their contents to resume, {_ACCEPT}",
        )
    return changed
