"""Locations of sources by name: a file, several files, a saved dataset, or a dataset of the hub."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import PREFIX, builtin_path, is_pattern, user_path
from hybridflow.data.hub import HubName, hub_name
from hybridflow.data.table_files import TABLE_SUFFIXES
from hybridflow.errors import DataError

LINE_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*LINE_SUFFIXES, ".json", *TABLE_SUFFIXES)
FORMATS = ".jsonl, .ndjson, .json, .csv, .tsv (all also .gz), .parquet, .arrow, .feather"
_SPLITS = ("train", "training", "test", "eval", "evaluation", "valid", "validation", "val", "dev")


@dataclass(frozen=True)
class Location:
    """Where the rows of a source are: in `files`, in the folder of a saved dataset, or on the hub."""

    data_source: str
    """A short name for metrics."""

    files: Sequence[Path] = ()
    saved: Path | None = None
    hub: HubName | None = None


def locate(name: str) -> Location:
    """The location that the name of a source refers to; raises `DataError` if there is no such file or dataset."""
    if name.startswith(PREFIX):
        return Location(name.removeprefix(PREFIX).split("/")[0], files=[builtin_path(name)])
    path, dataset = user_path(name), hub_name(name)
    if is_pattern(name):
        files = files_of_pattern(name)
        return Location(files[0].absolute().parent.name or "files", files=files)
    if path.is_file():
        if not suffix_of(path):
            raise DataError(f"'{name}' is not in a supported format.", remedy=f"Give one of: {FORMATS}.")
        return Location(short_name(path), files=[path])
    if path.is_dir() and _is_saved(path, name):
        return Location(short_name(path), saved=path)
    if path.is_dir():
        return Location(short_name(path), files=files_of_folder(path, name))
    if dataset is not None:
        return Location(short_name(Path(dataset.path)), hub=dataset)
    raise DataError(f"No such file or directory: '{name}'.", remedy=_nearest_path(path))


def suffix_of(path: Path) -> str:
    """The suffix that tells a data file's format, without `.gz`; empty for other files."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def files_of_pattern(name: str) -> list[Path]:
    """The files that a pattern matches, sorted; raises `DataError` if there are none, or of several formats."""
    found = sorted(Path(path) for path in glob(str(user_path(name)), recursive=True))
    files = [path for path in found if path.is_file()]
    if not files:
        raise DataError(
            f"No file matches '{name}'.",
            remedy="Correct the pattern (* is any text in a name, ** any folders, [[] a bracket); it is relative to"
            f" {Path.cwd()}.",
        )
    if others := [path.name for path in files if not suffix_of(path)]:
        raise DataError(
            f"'{name}' matches files in no supported format: {', '.join(others[:4])}.",
            remedy=f"Narrow the pattern to files of one format: {FORMATS}.",
        )
    _check_one_format(files, name)
    return files


def files_of_folder(folder: Path, name: str) -> list[Path]:
    """The data files directly in a folder, sorted.

    Raises `DataError` if there are none, if they have several formats, or if their names are those of several splits,
    since evaluation would then use rows of the training.
    """
    inside = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in inside if path.is_file() and suffix_of(path)]
    shown = name.rstrip("/")
    if not files:
        names = ", ".join(path.name for path in inside[:8])
        raise DataError(
            f"'{name}' is a directory with no data files" + (f"; it contains: {names}." if names else "."),
            remedy=f"Name files in it by a pattern ('{shown}/**/*.parquet'), or read it as a dataset of the hub:"
            f" '{shown}?split=train'. Formats: {FORMATS}, a directory of datasets.save_to_disk.",
        )
    _check_one_format(files, name)
    splits = sorted({word for path in files if (word := re.split(r"[-_.]", path.name)[0].lower()) in _SPLITS})
    if len(splits) > 1:
        raise DataError(
            f"'{name}' is a directory with the files of several splits: {', '.join(splits)}.",
            remedy=f"Name one of them by a pattern: '{shown}/{splits[-1]}*{suffix_of(files[0])}'.",
        )
    return files


def short_name(path: Path) -> str:
    """A name for metrics: the file's stem, or its folder's name if the stem only names a split."""
    stem = path.name.split(".")[0] or path.name
    folder = path.absolute().parent.name
    return folder if stem.lower() in _SPLITS and folder else stem


def _check_one_format(files: Sequence[Path], name: str) -> None:
    formats = sorted({suffix_of(path) for path in files})
    if len(formats) > 1:
        folder = name.rstrip("/") if "*" not in name else str(Path(name).parent)
        raise DataError(
            f"'{name}' holds files of several formats: {', '.join(formats)}.",
            remedy=f"Name those of each format as a source of its own, such as '{folder}/*{formats[0]}'.",
        )


def _nearest_path(path: Path) -> str:
    around = path.absolute().parent
    if not around.is_dir():
        return f"The directory '{path.parent}' does not exist either; paths are relative to {Path.cwd()}."
    names = sorted(found.name for found in around.iterdir() if not found.name.startswith("."))
    near = did_you_mean(path.name, names, are_files=True)
    if near:
        return f"{near}It is in '{around}'."
    names.sort(key=lambda name: not suffix_of(Path(name)))  # files of rows first
    return f"'{around}' contains: {', '.join(names[:8])}." if names else f"'{around}' is empty."


def _is_saved(path: Path, name: str) -> bool:
    """Whether a directory is a saved dataset; raises `DataError` for one with several splits."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(found.parent.name for found in path.glob("*/state.json"))
        raise DataError(
            f"'{name}' is a saved Hugging Face dataset with several splits ({', '.join(splits)}).",
            remedy=f"Name one of them: {name.rstrip('/')}/{(splits or ['train'])[0]}.",
        )
    return (path / "state.json").is_file()
