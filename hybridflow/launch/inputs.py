"""What a run reads: the files of its data, its models and its user's code, with a fingerprint of each."""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybridflow.config.absolute_paths import written_file
from hybridflow.config.carried_code import imported_modules
from hybridflow.config.data import Data
from hybridflow.config.derived import is_evaluated
from hybridflow.config.experiment import Experiment
from hybridflow.config.paths import PREFIX, builtin_path, user_path
from hybridflow.config.user_code import FILE_MODULE
from hybridflow.data.hub import hub_name, revision
from hybridflow.data.reasoning_gym import TASK_PREFIX
from hybridflow.elastic.compatibility import Fingerprints, file_fingerprint, words_of
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.models.loading import resolve_model_path
from hybridflow.parallel.file_records import in_threads

Digest = Callable[[], str]
"""Computes the fingerprint of one file, or asks the hub for the revision of a dataset."""

_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")


def fingerprints(composed: Composed, specs: Sequence[RoleSpec]) -> Fingerprints:
    """The fingerprints of all files that the run reads, under the names that the user wrote, and of the user's modules
    that the run has imported.

    So a run that is resumed from another copy of its directory is compared with the files that it reads there.
    """
    config, written = composed.config, _written(composed)
    found: dict[str, dict[str, Digest]] = {name: dict(_of_data(name)) for name in _data_files(config)}
    for spec in specs:
        for path in () if spec.model is None else (spec.model.path, spec.model.tokenizer_path):
            if path is not None:
                found[path] = dict(_of_directory(resolve_model_path(path), suffixes=_MODEL_FILES))
    template = config.data.chat_template
    named = [] if template is None else [template]
    texts = list(_texts(composed.flat().values()))
    files = {file for text in texts if (file := written_file(text)) is not None and user_path(file).is_file()}
    for name in [*named, *sorted(files)]:
        found[name] = {"": partial(file_fingerprint, user_path(name))}
    for module, path in _modules(texts, [user_path(file).absolute().parent for file in files]).items():
        found[f"module {module}"] = {"": partial(file_fingerprint, path)}
    digests = iter(in_threads(lambda digest: digest(), [each for files in found.values() for each in files.values()]))
    digested = {name: {file: next(digests) for file in files} for name, files in found.items()}
    return {word: files for name, files in digested.items() for word in written.get(name, [name])}


def _written(composed: Composed) -> Mapping[str, set[str]]:
    """What the user wrote for each absolute path in the configuration: in one setting so, in another perhaps so."""
    leaves = replace(composed, as_written={}).flat()
    names: dict[str, set[str]] = defaultdict(set)
    for key, text in composed.as_written.items():
        here = leaves[key]
        pairs = zip(here, text, strict=True) if isinstance(here, list) and isinstance(text, list) else [(here, text)]
        for path, word in pairs:
            names[str(path)].add(str(word))
    return names


def _data_files(config: Experiment) -> list[str]:
    data: Data = config.data
    return [*data.train_files, *data.pretraining_files, *(data.eval_files if is_evaluated(config) else [])]


def _of_data(name: str) -> Iterator[tuple[str, Digest]]:
    if name.startswith(TASK_PREFIX):
        return
    dataset = hub_name(name)
    path = builtin_path(name) if name.startswith(PREFIX) else user_path(dataset.path if dataset else name)
    if path.is_dir():
        yield from _of_directory(path)
    elif path.is_file():
        yield "", partial(file_fingerprint, path)
    elif dataset is not None:
        yield "", partial(revision, dataset)


def _of_directory(directory: Path, suffixes: Sequence[str] = ()) -> Iterator[tuple[str, Digest]]:
    """Each file; below the directory as well, unless suffixes say what counts in the directory itself."""
    for path in sorted(directory.iterdir() if suffixes else directory.rglob("*")):
        if path.is_file() and (not suffixes or path.suffix in suffixes):
            yield str(path.relative_to(directory)), partial(file_fingerprint, path)


def _texts(values: Iterable[object]) -> Iterator[str]:
    for value in values:
        yield from (word for word in words_of(value) if isinstance(word, str))


def _modules(texts: Iterable[str], folders: Iterable[Path]) -> dict[str, Path]:
    """The user's modules by name: those that settings name (`my_package.module.function`), and all imported ones from
    the current directory, from the directories of code named by its file, and from where those packages lie.

    The package's own do not count, nor what is installed, unless a setting names it.
    """
    named = {}
    for text in texts:
        name = text.rpartition(":")[2].rpartition(".")[0]
        module = None if name.partition(".")[0] == "hybridflow" else sys.modules.get(name)
        origin = module.__spec__.origin if module is not None and module.__spec__ is not None else None
        if origin is not None and origin.endswith(".py"):
            named[name] = Path(origin)
    packages = [_import_root(name, file) for name, file in named.items()]
    roots = {os.path.realpath(folder) for folder in [Path.cwd(), *folders, *packages]}
    imported = {name: file for name, file in imported_modules().items() if not name.startswith(FILE_MODULE)}
    return named | {n: f for n, f in imported.items() if any(f.resolve().is_relative_to(root) for root in roots)}


def _import_root(module: str, file: Path) -> Path:
    """The directory in which the import of a module found its outermost package."""
    depth = module.count(".") + (file.name == "__init__.py")
    return file.parents[min(depth, len(file.parents) - 1)]
