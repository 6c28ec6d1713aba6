"""Rows as the user's code makes them: `data.dataset` (a class), `data.map` (a function), and `data.prompt_template`."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data
from hybridflow.config.paths import PREFIX
from hybridflow.config.templates import template_parts
from hybridflow.config.user_code import described, ending_forks, load_callable, named_parameters
from hybridflow.data.locations import short_name
from hybridflow.data.reasoning_gym import TASK_PREFIX
from hybridflow.data.sources import Table, columns_of_rows
from hybridflow.errors import ConfigError, DataError

_PARAMETERS = "source, data_files (a list with the source), tokenizer, config"


def is_ours(name: str) -> bool:
    """Whether a source comes with the package or is generated, so that the user's code for rows does not apply."""
    return name.startswith((PREFIX, TASK_PREFIX))


@runtime_checkable
class Indexed(Protocol):
    """A data set with rows by index."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, object]:
        """One row."""
        ...


def own_dataset(name: str, config: Data, tokenizer: PreTrainedTokenizerBase | None) -> Indexed | Iterable:
    """The object of the class `data.dataset` for one entry of `data.train_files` or `data.eval_files`.

    The class is called with those of its parameters that have a known name; another first parameter gets the entry.
    """
    setting, key = str(config.dataset), "data.dataset"
    kind = load_callable(setting, key=key, what="class")
    known = {"data_files": [name], "source": name, "tokenizer": tokenizer, "config": config}
    parameters = [*named_parameters(kind).values()]
    given = {each.name: known[each.name] for each in parameters if each.name in known}
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in known]
    if missing and missing[0] == parameters[0].name and not {"data_files", "source"} & given.keys():
        given[missing.pop(0)] = name
    if missing:
        raise ConfigError(
            f"{key}: {setting} requires the parameter{'s' * (len(missing) > 1)} {', '.join(missing)}, which hybridflow"
            " does not provide.",
            remedy=f"Give {'them defaults' if len(missing) > 1 else 'it a default'}. Provided are: {_PARAMETERS}.",
        )
    with _user_code(f"{key}: {setting}", f"'{name}'"):
        found = kind(**given)
    if isinstance(found, Indexed | Iterable):
        return found
    raise ConfigError(
        f"{key}: a {setting} has neither __len__ and __getitem__ nor __iter__.",
        remedy="Give the class def __len__(self) and def __getitem__(self, index), which returns a row as a dict.",
    )


def own_table(name: str, config: Data, tokenizer: PreTrainedTokenizerBase | None) -> Table:
    """All rows of the class `data.dataset` for one entry of the files."""
    found, title = own_dataset(name, config, tokenizer), f"data.dataset: {config.dataset}"
    if isinstance(found, Indexed):
        rows = own_rows(found, range(len(found)), name, config)
    else:
        with _user_code(title, f"'{name}'"):
            rows = [*found]
        rows = [checked_row(row, f"{title} gave", f"row {index + 1} of '{name}'") for index, row in enumerate(rows)]
    if not rows:
        raise DataError(f"{title} gives no rows for '{name}'.", remedy="Give at least one row.")
    return Table(name, short_name(Path(name)), columns_of_rows(rows))


def own_rows(dataset: Indexed, indices: Iterable[int], name: str, config: Data) -> list[Mapping[str, object]]:
    """Some rows of the class `data.dataset`, checked."""
    rows, title = [], f"data.dataset: {config.dataset}"
    for index in indices:
        place = f"row {index + 1} of '{name}'"
        with _user_code(title, place):
            row = dataset[index]
        rows.append(checked_row(row, f"{title} gave", place))
    return rows


def mapped(table: Table, setting: str) -> Table:
    """The rows that the function `data.map` makes of a table's; a row for which it returns None is left out."""
    function, title = load_callable(setting, key="data.map"), f"data.map: {setting}"
    rows, kept = [], []
    for index in range(len(table)):
        place = table.place(index)
        with _user_code(title, place):
            row = function(table.row(index))
        if row is not None:
            rows.append(checked_row(row, f"{title} returned", place))
            kept.append(index)
    if not rows and not table.is_part:
        raise DataError(
            f"{title} returned None for all {len(table)} rows of '{table.name}'.",
            remedy="Return the row (a dict) for rows to keep.",
        )
    table.log(logging.INFO, "map=%s gives %d of %d rows", setting, len(rows), len(table))
    return table.with_rows(rows, kept)


def templated(table: Table, template: str) -> Table:
    """The table with the column `prompt` that `data.prompt_template` makes of other columns."""
    parts = template_parts(template)
    named = {name: table.column(name, key="data.prompt_template") for _, name in parts if name is not None}
    prompts = []
    for index in range(len(table)):
        for name, values in named.items():
            if values[index] is None or isinstance(values[index], list | dict):
                what = "nothing" if values[index] is None else f"a value of type {type(values[index]).__name__}"
                raise DataError(
                    f"data.prompt_template: {table.place(index)} has {what} in the column '{name}', not text.",
                    remedy="Leave such rows out with data.map, or let it write the column 'prompt'.",
                )
        prompts.append("".join(text + ("" if name is None else str(named[name][index])) for text, name in parts))
    return replace(table, columns=table.columns | {"prompt": prompts}, layout="prompt_template")


def checked_row(row: object, title: str, place: str) -> Mapping[str, object]:
    """The row; raises `DataError` unless it is a mapping of the names of columns to values."""
    if isinstance(row, Mapping) and row and all(isinstance(name, str) for name in row):
        return row
    what = (
        f"an object of type {type(row).__name__}"
        if not isinstance(row, Mapping)
        else "a dict without columns, or with other keys"
    )
    raise DataError(
        f"{title} {what} for {place}, not a row.",
        remedy='Give each row as a dict of its columns: {"prompt": ..., "answer": ...}.',
    )


@contextmanager
def _user_code(title: str, place: str) -> Iterator[None]:
    """Errors of the user's code become a `DataError` that names it and the row; processes that it forks end."""
    try:
        with ending_forks():
            yield
    except (Exception, SystemExit) as error:
        did = "called sys.exit:" if isinstance(error, SystemExit) else "raised"
        raise DataError(
            f"{title} {did} {described(error, callers={__file__})}, for {place}.",
            remedy="Fix the code so that it accepts this row; data.map returns None to leave a row out.",
        ) from error
