"""The rows of a source that a run uses: after `data.map` and `data.filters`, with the difficulty of each row."""

import inspect
import logging
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.user_code import ending_forks, load_callable, named_parameters
from hybridflow.data.json_cells import with_parsed_cells
from hybridflow.data.layouts import recognized
from hybridflow.data.own_rows import is_ours, mapped, own_table, templated
from hybridflow.data.sources import Source, Table, read_table
from hybridflow.errors import DataError, raised_together

logger = logging.getLogger(__name__)

_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of data sets for models that read more than text."""


def read_rows(source: Source, config: Data, tokenizer: PreTrainedTokenizerBase | None = None) -> Table:
    """The rows of a source that pass the filters, at most `data.max_rows`, with numbers in `difficulty_key`.

    `source` is its name, or rows of it that are `prepared`.
    """
    table = source if isinstance(source, Table) else prepared(_read(source, config, tokenizer), config)
    name, filters = table.name, []
    with raised_together() as faults:
        for setting in config.filters:
            with faults.caught():
                function = load_callable(setting, key="data.filters")
                filters.append((setting, function, _wanted_columns(function, setting, table)))
    for setting, function, wanted in filters:
        table = _filtered(table, setting, function, wanted)
    if config.max_rows is not None and config.max_rows < len(table):
        logger.info("data=%s rows=%d data.max_rows=%d: only the first are used", name, len(table), config.max_rows)
        table = table.select(range(config.max_rows))
    _check_own_uids(table)
    _check_media(table)
    return _with_difficulties(table, config.difficulty_key) if config.difficulty_key else table


def _read(name: str, config: Data, tokenizer: PreTrainedTokenizerBase | None) -> Table:
    return read_table(name, config) if config.dataset is None or is_ours(name) else own_table(name, config, tokenizer)


def prepared(table: Table, config: Data) -> Table:
    """Rows after `data.map` and `data.prompt_template`; those of a public layout get our columns."""
    if config.map is not None and not is_ours(table.name):
        table = mapped(table, config.map)
    if config.prompt_template is not None and not is_ours(table.name):
        return templated(table, config.prompt_template)
    return recognized(with_parsed_cells(table, config), config.prompt_key)


def _check_media(table: Table) -> None:
    """Raises `DataError` for rows with images, video or sound."""
    for name in _MEDIA:
        for row, value in enumerate(table.columns.get(name, [])):
            if value not in (None, "", []):
                raise DataError(
                    f"{table.place(row)} has a value in the column '{name}', but only text is supported.",
                    remedy=f"Leave such rows out with data.filters, or let data.map drop the column '{name}'.",
                )


def unselected(config: Data) -> Data:
    """The same settings for files of which all rows are used: held-out rows and pretraining texts."""
    return replace(
        config, filters=[], max_rows=None, mixture=[], difficulty_key=None, curriculum_steps=0, streaming=False
    )


def _filtered(table: Table, setting: str, function: Callable[..., object], wanted: list[str]) -> Table:
    kept = [row for row in range(len(table)) if _passes(function, wanted, table, row, setting)]
    if not kept and not table.is_part:
        raise DataError(
            f"data.filters: {setting} keeps none of the {len(table)} rows of '{table.name}'.",
            remedy="A filter returns True for each row to keep; check what it compares.",
        )
    table.log(logging.INFO, "filter=%s keeps %d of %d rows", setting, len(kept), len(table))
    return table.select(kept)


def _wanted_columns(function: Callable[..., object], setting: str, table: Table) -> list[str]:
    """The columns that the function's parameters name, or all columns if it takes `**kwargs`."""
    named = named_parameters(function)
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in table.columns:
            raise DataError(
                f"data.filters: {setting} needs a column '{name}', which '{table.name}' does not have.",
                remedy=f"{did_you_mean(name, table.columns)}Its columns are: {', '.join(table.columns)};"
                " give the parameter a default if a file may lack it.",
            )
    if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values()):
        return [*table.columns]
    return [name for name in named if name in table.columns]


def _passes(function: Callable[..., object], wanted: list[str], table: Table, row: int, setting: str) -> bool:
    """The filter's result for copies of a row's values; a process that the filter forks exits when it returns."""
    place = table.place(row)
    try:
        with ending_forks():
            answer = function(**{name: deepcopy(table.columns[name][row]) for name in wanted})
    except (Exception, SystemExit) as error:
        raise DataError(
            f"data.filters: {setting} raised {type(error).__name__}: {error}, for {place}.",
            remedy="Fix the function, or return False for such a row.",
        ) from error
    if not isinstance(answer, bool):
        raise DataError(
            f"data.filters: {setting} returned {answer!r} (of type {type(answer).__name__}) for {place}.",
            remedy="Return True to keep a row and False to leave it out: bool(...).",
        )
    return answer


def _check_own_uids(table: Table) -> None:
    """Raises `DataError` if two rows have the same `uid`, since they are most likely the same row."""
    seen: dict[str, int] = {}
    for row, uid in enumerate(table.columns.get("uid", [])):
        first = seen.setdefault(repr(uid), row)
        if uid is not None and first != row:
            raise DataError(
                f"Rows {table.number(first)} and {table.number(row)} of '{table.name}' have the same uid, {uid!r}.",
                remedy="Remove the duplicates, or rename the column: the run numbers the rows itself.",
            )


def _with_difficulties(table: Table, key: str) -> Table:
    """The table with the difficulties in a column named `key`, which may be a dotted path into a column of objects."""
    values = table.column(key, key="data.difficulty_key")
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < sys.float_info.max:
            raise DataError(
                f"data.difficulty_key={key}: {table.place(row)} has {value!r}, which is not a finite number.",
                remedy="Give every row a number (larger is harder), or leave such rows out with data.filters.",
            )
    return replace(table, columns={**table.columns, key: values})
