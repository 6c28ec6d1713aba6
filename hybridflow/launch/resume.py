"""The files that a run reads, and their changes since the checkpoint it resumes from: refused or logged."""

import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hybridflow.config.absolute_paths import command_files, path_settings, written_file
from hybridflow.config.carried_code import imported_modules
from hybridflow.config.data import Data
from hybridflow.config.loop import ResumeChanged
from hybridflow.config.paths import PREFIX, builtin_path, is_pattern, user_path
from hybridflow.config.user_code import FILE_MODULE
from hybridflow.data.hub import hub_name, revision
from hybridflow.data.loader import BatchStream
from hybridflow.data.locations import files_of_pattern
from hybridflow.data.reasoning_gym import TASK_PREFIX
from hybridflow.elastic.checkpoint import Checkpoint
from hybridflow.elastic.compatibility import (
    Fingerprints,
    check_compatible,
    check_unchanged,
    compare,
    file_fingerprint,
    flat,
    with_moves_undone,
    words_of,
)
from hybridflow.errors import CheckpointError, raised_together
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.data import PRETRAINING, RunData
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.models.loading import resolve_model_path, resolve_tokenizer_path
from hybridflow.observability.redaction import redacted_leaves
from hybridflow.parallel.file_records import in_threads

logger = logging.getLogger(__name__)

_Digest = Callable[[], str]
"""Computes the fingerprint of one file, or asks the hub for the revision of a dataset."""

_TRAINING_FILES = ("data.train_files", "data.pretraining_files")
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")


@dataclass(frozen=True)
class Changes:
    """Differences from the run that wrote the checkpoint, as log lines: changed settings are `notes`, changed contents
    `warnings`."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def log(self) -> None:
        """Logs the changes, after every check of the resume has passed."""
        for note in self.notes:
            logger.info("%s", note)
        for warning in self.warnings:
            logger.warning("%s (trainer.resume_changed=accept)", warning)


def check_resumable(checkpoint: Checkpoint, plan: RunPlan, data: RunData, inputs: Fingerprints) -> Changes:
    """The changes since the checkpoint. Raises `CheckpointError` if one keeps the run from resuming."""
    composed = plan.composed
    policy, state = composed.config.trainer.resume_changed, checkpoint.driver_state()
    saved, now, before = redacted_leaves(state["config"]), composed.redacted(), state.get("inputs", {})
    in_place = with_moves_undone(saved, now, path_settings(composed.config), before, inputs)
    written = flat(now)
    named = {key: set(words_of(written[key])) for key in (*_TRAINING_FILES, "data.eval_files")}
    only_evaluated = named["data.eval_files"].difference(*(named[key] for key in _TRAINING_FILES))
    shown = {name: files for name, files in inputs.items() if name in only_evaluated}
    settings, files = [], []
    with raised_together() as faults:
        with faults.caught():
            settings = check_compatible(saved, in_place, policy)
        with faults.caught():
            files = check_unchanged(before, {name: inputs[name] for name in inputs.keys() - shown.keys()}, policy)
    rows = changed_rows(state["streams"], data.streams, policy)
    checkpoint.check_parts(plan.trained)
    moves = compare(in_place, now)
    said = [(change, f"resuming with {change.key}={change.now!r} (was {change.saved!r})") for change in settings]
    return Changes(
        notes=[
            *(words for change, words in said if not change.is_of_inputs and change.key != "trainer.resume_changed"),
            *(
                f"resuming although '{name}' of data.eval_files has changed: later evaluations use different rows"
                for name in check_unchanged(before, shown, ResumeChanged.accept)
            ),
            *(f"resuming with {move.key}={move.now!r} (was {move.saved!r}, with the same contents)" for move in moves),
        ],
        warnings=[
            *(words for change, words in said if change.is_of_inputs),
            *(f"resuming although '{name}' has changed" for name in files),
            *rows,
        ],
    )


def changed_rows(
    saved: Mapping[str, Mapping[str, int]], streams: Mapping[str, BatchStream], policy: ResumeChanged
) -> list[str]:
    """For each stream whose number of rows differs from the checkpoint's, a line that says where it continues.

    A stream keeps its position: the number of rows that were read from it. The order of the current rows determines
    which rows follow. Raises `CheckpointError`, unless the policy is `accept`.
    """
    found = []
    for name, stream in streams.items():
        rows, before = len(stream), saved[name]["rows"]
        if rows == before:
            continue
        key = "data.pretraining_files" if name == PRETRAINING else "data.train_files"
        if policy is ResumeChanged.refuse:
            raise CheckpointError(
                f"{key} gives {rows} rows; when the checkpoint was written it gave {before}.",
                remedy="Restore the data, or the settings that choose rows from it (data.filters, data.max_rows);"
                " continue with the current rows (trainer.resume_changed=accept); or start over"
                " (trainer.resume=never).",
            )
        position = saved[name]["position"]
        found.append(
            f"resuming with {rows} rows of {key} (there were {before}): {position} rows were used, so the run"
            f" continues at {stream.place(position)}"
        )
    return found


def fingerprints(plan: RunPlan) -> Fingerprints:
    """The fingerprints of all files that the run reads, under the names that the user wrote, and of the user's modules
    that the run has imported.

    A run that is resumed from another copy of its directory is therefore compared with the files in that copy.
    """
    data, is_trained = plan.config.data, plan.config.trainer.total_steps > 0
    to_train = [*data.train_files, *data.pretraining_files] if is_trained else []
    found = _data_files(data, [*to_train, *(data.eval_files if plan.is_evaluated else [])])
    for role in plan.roles:
        found |= {} if role.model is None else _model_files(role.model.path, role.model.tokenizer_path)
    texts = _texts(plan.composed)
    found |= (named := _named_files(texts, plan.composed))
    folders = [user_path(file).absolute().parent for file in named if file != data.chat_template]
    for module, path in _modules(texts, folders).items():
        found[f"module {module}"] = {"": partial(file_fingerprint, path)}
    return _digested(found, plan.composed)


def fingerprints_to_generate(composed: Composed) -> Fingerprints:
    """As `fingerprints`, without modules, for a run of `hybridflow generate` that has no plan yet."""
    data, model = composed.config.data, composed.config.model
    found = _data_files(data, data.eval_files) | _model_files(model.path, model.tokenizer_path)
    return _digested(found | _named_files(_texts(composed), composed), composed)


def _digested(found: Mapping[str, Mapping[str, _Digest]], composed: Composed) -> Fingerprints:
    """Fingerprints under the names that the user wrote."""
    written = _written(composed)
    digests = iter(in_threads(lambda digest: digest(), [each for files in found.values() for each in files.values()]))
    digested = {name: {file: next(digests) for file in files} for name, files in found.items()}
    return {word: files for name, files in digested.items() for word in written.get(name, [name])}


def _data_files(data: Data, sources: Iterable[str]) -> dict[str, dict[str, _Digest]]:
    """The files of sources; those of a data class of the user's only if they are paths."""
    return {name: dict(_of_data(name)) for name in sources if data.dataset is None or user_path(name).exists()}


def _model_files(model: str | None, tokenizer: str | None) -> dict[str, dict[str, _Digest]]:
    """The files of a model and of a tokenizer that is elsewhere."""
    places = {} if model is None else {model: resolve_model_path(model)}
    places |= {} if tokenizer is None else {tokenizer: resolve_tokenizer_path(tokenizer)}
    return {name: dict(_of_directory(place, suffixes=_MODEL_FILES)) for name, place in places.items()}


def _texts(composed: Composed) -> list[str]:
    return [word for value in composed.flat().values() for word in words_of(value) if isinstance(word, str)]


def _named_files(texts: Iterable[str], composed: Composed) -> dict[str, dict[str, _Digest]]:
    """The files of functions and classes that settings name, those in commands of the environment, and the chat
    template."""
    written, template = composed.flat(), composed.config.data.chat_template
    files = {file for text in texts if (file := written_file(text)) is not None and user_path(file).is_file()}
    for command in [*words_of(written["environment.program"]), *words_of(written["environment.mcp"])]:
        files.update(command_files(command) if isinstance(command, str) else [])
    files |= set() if template is None else {template}
    return {file: {"": partial(file_fingerprint, user_path(file))} for file in sorted(files)}


def _written(composed: Composed) -> Mapping[str, set[str]]:
    """The user's text for each absolute path in the configuration; two settings may write one path differently."""
    flat = replace(composed, as_written={}).flat()
    names: dict[str, set[str]] = defaultdict(set)
    for key, text in composed.as_written.items():
        here = flat[key]
        pairs = zip(here, text, strict=True) if isinstance(here, list) and isinstance(text, list) else [(here, text)]
        for path, word in pairs:
            names[str(path)].add(str(word))
    return names


def _of_data(name: str) -> Iterator[tuple[str, _Digest]]:
    if name.startswith(TASK_PREFIX):
        return
    dataset = hub_name(name)
    path = builtin_path(name) if name.startswith(PREFIX) else user_path(dataset.path if dataset else name)
    if is_pattern(name):
        yield from ((str(file), partial(file_fingerprint, file)) for file in files_of_pattern(name))
    elif path.is_dir():
        yield from _of_directory(path)
    elif path.is_file():
        yield "", partial(file_fingerprint, path)
    elif dataset is not None:
        yield "", partial(revision, dataset)


def _of_directory(directory: Path, suffixes: Sequence[str] = ()) -> Iterator[tuple[str, _Digest]]:
    """All files below the directory or, with suffixes, the files directly in it that have one of them."""
    for path in sorted(directory.iterdir() if suffixes else directory.rglob("*")):
        if path.is_file() and (not suffixes or path.suffix in suffixes):
            yield str(path.relative_to(directory)), partial(file_fingerprint, path)


def _modules(texts: Iterable[str], folders: Iterable[Path]) -> dict[str, Path]:
    """The user's modules by name: those that settings name (`my_package.module.function`), and all imported ones from
    the current directory, from the directories of code named by its file, and from where those packages lie.

    The package's own do not count, nor what is installed, unless a setting names it.
    """
    named, packages = {}, []
    for text in texts:
        name = text.rpartition(":")[2].rpartition(".")[0]
        module = None if name.partition(".")[0] == "hybridflow" else sys.modules.get(name)
        origin = module.__spec__.origin if module is not None and module.__spec__ is not None else None
        if origin is not None and origin.endswith(".py"):
            named[name] = file = Path(origin)
            depth = name.count(".") + (file.name == "__init__.py")  # of the file below where its package was found
            packages.append(file.parents[min(depth, len(file.parents) - 1)])
    roots = {os.path.realpath(folder) for folder in [Path.cwd(), *folders, *packages]}
    imported = {name: file for name, file in imported_modules().items() if not name.startswith(FILE_MODULE)}
    return named | {n: f for n, f in imported.items() if any(f.resolve().is_relative_to(root) for root in roots)}
