"""Reads one source (built-in rows, a generated task, a file, a saved dataset, a dataset of the hub) as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet

from hybridflow.batch import Batch
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import PREFIX, builtin_path, user_path
from hybridflow.data.hub import hub_name, read_hub
from hybridflow.data.json_files import read_json, read_json_lines
from hybridflow.data.reasoning_gym import TASK_PREFIX, read_task
from hybridflow.errors import DataError
from hybridflow.optional import require

_FORMATS = ".jsonl, .json (both also .gz), .parquet, a saved Hugging Face dataset directory"
_SPLIT_NAMES = ("train", "training", "test", "eval", "evaluation", "valid", "validation", "val", "dev")
_NAMES_IN_FILES = {"ref_sums": "ref_chosen_logps, ref_rejected_logps"}
"""Columns of a batch that have other names in files."""


@dataclass(frozen=True)
class Table:
    """N rows as columns of Python values. `name` is what the user typed, `data_source` a short name for metrics."""

    name: str
    data_source: str
    columns: dict[str, list]
    numbers: Sequence[int] | None = None
    """The number of each row in the source, from 1, if some of the source's rows were left out."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    @property
    def data_sources(self) -> list[str]:
        """The `data_source` of each row: its own column if there is one, else the table's."""
        own = self.columns.get("data_source", [None] * len(self))
        return [self.data_source if value is None else str(value) for value in own]

    def column(self, name: str, *, key: str) -> list:
        """A column by name, or by a dotted path into a column of objects; `key` is the setting that names it."""
        if name in self.columns:
            return self.columns[name]
        outer, _, inner = name.partition(".")
        if inner and outer in self.columns:
            return [value.get(inner) if isinstance(value, dict) else None for value in self.columns[outer]]
        raise DataError(
            f"{key}={name}: '{self.name}' has no such column.",
            remedy=f"{did_you_mean(name, self.columns)}Its columns are: {', '.join(self.columns)}.",
        )

    def first(self, names: Sequence[str]) -> str | None:
        """The first of the names that is a column."""
        return next((name for name in names if name in self.columns), None)

    def number(self, index: int) -> int:
        """The number of a row in the source, from 1."""
        return index + 1 if self.numbers is None else self.numbers[index]

    def place(self, index: int) -> str:
        """`row 3 of 'train.jsonl'`."""
        return f"row {self.number(index)} of '{self.name}'"

    def select(self, kept: Sequence[int]) -> "Table":
        """Some of the rows, which keep their numbers."""
        columns = {name: [values[row] for row in kept] for name, values in self.columns.items()}
        return Table(self.name, self.data_source, columns, [self.number(row) for row in kept])


def read_table(name: str) -> Table:
    """The rows of one source; raises `DataError` if it cannot be read or has no rows."""
    if name.startswith(TASK_PREFIX):
        data_source, columns = read_task(name)
        return Table(name, data_source, columns)
    if name.startswith(PREFIX):
        path, data_source = builtin_path(name), name.removeprefix(PREFIX).split("/")[0]
    else:
        path, data_source = user_path(name), short_name(Path(name))
    dataset = hub_name(name)
    if path.is_file():
        columns = _read_file(path, name)
    elif path.is_dir():
        columns = _read_directory(path, name)
    elif dataset is not None:
        columns, data_source = read_hub(name, dataset), short_name(Path(dataset.path))
    else:
        raise DataError(f"No such file or directory: '{name}'.", remedy=_nearest_path(path))
    table = Table(name, data_source, columns)
    if len(table) == 0:
        raise DataError(f"'{name}' has no rows.", remedy="Give a file with at least one row, or leave it out.")
    return table


def read_files(files: Sequence[str], read: Callable[[str], Batch]) -> Batch:
    """The rows of all files, in order, each file read by `read`; raises `DataError` if no file is named."""
    if not files:
        raise DataError("No data files are named.", remedy="Set data.train_files=[path,...].")
    return joined([read(name) for name in files], files)


def joined(parts: Sequence[Batch], files: Sequence[str]) -> Batch:
    """The rows of several files as one batch; an object column that a file lacks is None in its rows."""
    names = dict.fromkeys(name for part in parts for name in part.objects)
    filled = []
    for part, file in zip(parts, files, strict=True):
        _check_same_columns(parts[0], files[0], part, file)
        filled.append(part.with_columns(objects={name: [None] * len(part) for name in names if name not in part}))
    return Batch.concat(filled)


def short_name(path: Path) -> str:
    """A name for metrics: the file's stem, or its folder's name if the stem only names a split."""
    stem = path.name.split(".")[0] or path.name
    folder = path.absolute().parent.name
    return folder if stem.lower() in _SPLIT_NAMES and folder else stem


def _check_same_columns(first: Batch, first_file: str, part: Batch, file: str) -> None:
    """Columns of numbers and tokens, unlike objects, must be in all files or in none."""
    own = {*first.row_columns, *first.token_columns}
    found = {*part.row_columns, *part.token_columns}
    for more, fewer, has, lacks in ((own, found, first_file, file), (found, own, file, first_file)):
        if missing := ", ".join(_NAMES_IN_FILES.get(name, name) for name in sorted(more - fewer)):
            raise DataError(
                f"'{has}' has the columns {missing}, but '{lacks}' does not.",
                remedy="Give both files the same columns: add the missing ones, or remove them from the other file.",
            )


def _read_file(path: Path, name: str) -> dict[str, list]:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _columns(read_json_lines(path, name))
    if suffix == ".json":
        return _columns(read_json(path, name))
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, name)
    raise DataError(f"'{name}' is not in a supported format.", remedy=f"Give one of: {_FORMATS}.")


def _columns(rows: Sequence[Mapping[str, object]]) -> dict[str, list]:
    """The columns of all rows, in order of first appearance; None in a row that lacks the column."""
    names = dict.fromkeys(key for row in rows for key in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _read_parquet(path: Path, name: str) -> dict[str, list]:
    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(".")
        raise DataError(
            f"'{name}' is not a readable parquet file: {reason}.",
            remedy="Write it again, with text in UTF-8 and dates between the years 1 and 9999.",
        ) from error


def _read_directory(path: Path, name: str) -> dict[str, list]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(found.parent.name for found in path.glob("*/state.json"))
        raise DataError(
            f"'{name}' is a saved Hugging Face dataset with several splits ({', '.join(splits)}).",
            remedy=f"Name one of them: {name.rstrip('/')}/{(splits or ['train'])[0]}.",
        )
    if not (path / "state.json").is_file():
        files = sorted(found.name for found in path.iterdir() if found.is_file())[:8]
        raise DataError(
            f"'{name}' is a directory, but not one written by datasets.save_to_disk.",
            remedy=(f"Give a file in it ({', '.join(files)})" if files else f"Give one of: {_FORMATS}")
            + f", or read it as a dataset of the hub: '{name.rstrip('/')}?split=train'.",
        )
    # Imported only here: `datasets` takes a second to import, and most runs read plain files.
    datasets = require("datasets")
    try:
        return datasets.load_from_disk(str(path)).to_dict()
    except Exception as error:  # it may be files of any kind, which fail in as many ways
        raise DataError(f"'{name}' is a damaged Hugging Face dataset: {error}", remedy="Save it again.") from error


def _nearest_path(path: Path) -> str:
    around = path.absolute().parent
    if not around.is_dir():
        return f"The directory '{path.parent}' does not exist either; paths are relative to {Path.cwd()}."
    names = sorted(found.name for found in around.iterdir() if not found.name.startswith("."))
    near = did_you_mean(path.name, names)
    if near:
        return f"{near}It is in '{around}'."
    return f"'{around}' contains: {', '.join(names[:8])}." if names else f"'{around}' is empty."
