"""What a run reads: the files of its data, its models and its user's code, with a fingerprint of each."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hybridflow.config.builtin import PREFIX, builtin_path
from hybridflow.config.data import Data
from hybridflow.config.derived import is_evaluated
from hybridflow.config.experiment import Experiment
from hybridflow.config.paths import user_path
from hybridflow.data.hub import hub_name, revision
from hybridflow.data.reasoning_tasks import TASK_PREFIX
from hybridflow.elastic.fingerprints import Fingerprints, file_fingerprint
from hybridflow.launch.compose import Composed
from hybridflow.launch.roles import RoleSpec
from hybridflow.models.loading import resolve_model_path
from hybridflow.parallel.file_records import in_threads

Digest = Callable[[], str]
"""Computes the fingerprint of one file, or asks the hub for the revision of a dataset."""

_CODE = re.compile(r"(?:\w+:)?(?P<file>.+\.py):\w+")
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".tiktoken", ".py")


def fingerprints(composed: Composed, specs: Sequence[RoleSpec]) -> Fingerprints:
    """The fingerprints of all files that the run reads, under the names that the user wrote.

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
    for name in [*named, *_code_files(composed.flat().values())]:
        found[name] = {"": partial(file_fingerprint, user_path(name))}
    digests = iter(in_threads(lambda digest: digest(), [each for files in found.values() for each in files.values()]))
    return {written.get(name, name): {file: next(digests) for file in files} for name, files in found.items()}


def _written(composed: Composed) -> dict[str, str]:
    """What the user wrote for each absolute path in the configuration."""
    leaves = replace(composed, as_written={}).flat()
    names: dict[str, str] = {}
    for key, text in composed.as_written.items():
        here = leaves[key]
        pairs = zip(here, text, strict=True) if isinstance(here, list) and isinstance(text, list) else [(here, text)]
        names |= {str(path): str(word) for path, word in pairs}
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


def _code_files(values: Iterable[object]) -> Iterator[str]:
    """The files behind `path/file.py:name` and `my_package.module.name`; the package's own do not count."""
    for value in values:
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if (found := _CODE.fullmatch(text)) and user_path(found["file"]).is_file():
                yield found["file"]
            module = sys.modules.get(text.rpartition(".")[0])
            if module is not None and not text.startswith("hybridflow.") and (module.__spec__ is not None):
                origin = module.__spec__.origin
                if origin is not None and origin.endswith(".py"):
                    yield origin
