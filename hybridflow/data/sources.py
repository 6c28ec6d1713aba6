"""Sources: built-in and made-up data, files, saved Hugging Face datasets and names on the hub become tables."""

from pathlib import Path

import pyarrow
import pyarrow.parquet

from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import PREFIX, builtin_path, user_path
from hybridflow.data.hub import hub_name, read_hub
from hybridflow.data.json_rows import read_json, read_json_lines
from hybridflow.data.reasoning_tasks import TASK_PREFIX, read_task
from hybridflow.data.table import Table
from hybridflow.errors import DataError
from hybridflow.optional import require

_FORMATS = ".jsonl, .json (both also .gz), .parquet, a saved Hugging Face dataset directory"
_SPLIT_NAMES = ("train", "training", "test", "eval", "evaluation", "valid", "validation", "val", "dev")


def read_table(name: str) -> Table:
    """The rows of one source; what cannot be read, and what holds no row, is a `DataError` in the user's words."""
    if name.startswith(TASK_PREFIX):
        return read_task(name)
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
        raise DataError(f"'{name}' holds no rows.", remedy="Give a file with at least one row, or leave it out.")
    return table


def short_name(path: Path) -> str:
    """A name for metrics: the file's stem, or its folder's name where the stem only says which split it is."""
    stem = path.name.split(".")[0] or path.name
    folder = path.absolute().parent.name
    return folder if stem.lower() in _SPLIT_NAMES and folder else stem


def _read_file(path: Path, name: str) -> dict[str, list]:
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return Table.of_rows(name, "", read_json_lines(path, name)).columns
    if suffix == ".json":
        return Table.of_rows(name, "", read_json(path, name)).columns
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, name)
    raise DataError(f"'{name}' is not of a kind that can be read.", remedy=f"Give one of: {_FORMATS}.")


def _read_parquet(path: Path, name: str) -> dict[str, list]:
    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"'{name}' is not a readable parquet file: {_first_line(error)}.",
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
            f"'{name}' is a directory, but not one that datasets.save_to_disk wrote.",
            remedy=(f"Give a file in it ({', '.join(files)})" if files else f"Give one of: {_FORMATS}")
            + f", or read it as a dataset of the hub: '{name.rstrip('/')}?split=train'.",
        )
    # Imported only here: `datasets` takes a second to import, and most runs read plain files.
    datasets = require("datasets")
    try:
        return datasets.load_from_disk(str(path)).to_dict()
    except Exception as error:  # it may be files of any kind, which fail in as many ways
        raise DataError(f"'{name}' is a damaged Hugging Face dataset: {error}", remedy="Save it again.") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300].rstrip(".")


def _nearest_path(path: Path) -> str:
    around = path.absolute().parent
    if not around.is_dir():
        return f"The directory '{path.parent}' does not exist either; paths are relative to {Path.cwd()}."
    names = sorted(found.name for found in around.iterdir() if not found.name.startswith("."))
    near = did_you_mean(path.name, names)
    if near:
        return f"{near}It is in '{around}'."
    return f"'{around}' has: {', '.join(names[:8])}." if names else f"'{around}' is empty."
