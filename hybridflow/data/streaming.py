"""Training rows that are read, mapped, checked and tokenized when a batch needs them (`data.streaming`)."""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch import Batch
from hybridflow.config.data import Data
from hybridflow.data.locations import locate, short_name
from hybridflow.data.own_rows import Indexed, is_ours, own_dataset, own_rows
from hybridflow.data.selection import prepared, read_rows
from hybridflow.data.sources import Table, columns_of_rows, open_dataset, read_table
from hybridflow.data.stored_rows import StoredRows, concatenated, dataset_rows, stored_file
from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.formatting import percent
from hybridflow.observability.slow_work import SlowWork

logger = logging.getLogger(__name__)

Encode = Callable[[Table], Batch]
"""Makes a batch of the rows of a table, without those that are filtered out or too long."""

_FIRST_ROWS = 1000
"""Rows that are read when a source is opened. They determine the columns, and are checked before the run starts."""


class StreamedRows:
    """The rows of one source on demand.

    Some of the rows that are asked for may be left out, by the filters or because they are too long; how many is
    counted, and an error if too few are kept.
    """

    def __init__(self, name: str, config: Data, encode: Encode, tokenizer: PreTrainedTokenizerBase) -> None:
        self._name, self._config, self._encode = name, config, encode
        self._data_source, self._stored = _opened(name, config, tokenizer)
        self._asked = self._kept = 0
        self._next_warning = _FIRST_ROWS
        count = min(_FIRST_ROWS, len(self))
        raw = self._raw(range(count))
        first = prepared(raw, config)
        self._raw_names, self._names = [*raw.columns], [*first.columns]
        logger.info("data=%s rows=%d streaming: the first %d are checked now", name, len(self), count)
        batch = encode(first)
        if len(batch) > count:
            raise ConfigError(
                f"'{name}' gives {len(batch)} responses for {count} pairs, which data.streaming=true cannot split.",
                remedy="Give rows with prompt, completion and label, or set data.streaming=false.",
            )
        self.num_used = round(len(self) * len(batch) / count) or 1
        """The number of rows that are not left out, as far as the first rows show."""
        self._none = batch.slice(0, 0)
        self.columns = batch.columns

    def __len__(self) -> int:
        whole = self._stored.count
        return whole if self._config.max_rows is None else min(whole, self._config.max_rows)

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """The rows at the given positions that are used, in that order."""
        raw = replace(self._raw(torch.as_tensor(rows).tolist()).with_names(self._raw_names), is_part=True)
        table = prepared(raw, self._config)
        batch = self._encode(table.with_names(self._names)) if len(table) else self._none
        missing = {name: [None] * len(batch) for name in self.columns if name not in batch}
        self._count(len(rows), len(batch))
        return batch.with_columns(objects=missing).only(self.columns)

    def difficulties(self, key: str) -> Tensor:
        """The difficulty of each row [N], which takes a pass over all rows; infinite for those that are left out."""
        found = torch.full((len(self),), math.inf, dtype=torch.float64)
        work = SlowWork(f"reading data.difficulty_key={key} of", "rows", len(self))
        for start in range(0, len(self), _FIRST_ROWS):
            rows = range(start, min(start + _FIRST_ROWS, len(self)))
            raw = replace(self._raw(rows).with_names(self._raw_names), is_part=True)
            table = prepared(raw, self._config)
            if len(table):
                table = read_rows(table.with_names(self._names), self._config)
                kept = [table.number(row) - 1 for row in range(len(table))]
                found[kept] = torch.tensor(table.columns[key], dtype=torch.float64)
            work.reach(rows.stop)
        return found

    def _raw(self, indices: Sequence[int]) -> Table:
        columns = columns_of_rows(self._stored.rows(indices))
        return Table(self._name, self._data_source, columns, [index + 1 for index in indices])

    def _count(self, asked: int, kept: int) -> None:
        self._asked, self._kept = self._asked + asked, self._kept + kept
        if self._asked < self._next_warning or self._kept == self._asked:
            return
        self._next_warning = 10 * self._asked
        share = percent(self._kept, self._asked)
        logger.warning("data=%s %d of %d rows kept so far (%s)", self._name, self._kept, self._asked, share)
        if self._kept == 0 or self._kept < self._config.min_kept_fraction * self._asked:
            raise DataError(
                f"'{self._name}': only {self._kept} of the first {self._asked} rows read ({share}) could be used; the"
                " others were filtered out, too long or blank.",
                remedy="Filter the file before the run, or set data.min_kept_fraction=0."
                if self._kept
                else "Check data.map, data.filters and the length limits.",
            )


class JoinedRows:
    """The rows of several sources on demand, one after another. In a batch, rows are in the order of their sources."""

    def __init__(self, parts: Sequence[StreamedRows]) -> None:
        self._parts = parts
        self._ends = [*accumulate(map(len, parts))]
        self.num_used = sum(part.num_used for part in parts)
        self.columns = [*dict.fromkeys(name for part in parts for name in part.columns)]

    def __len__(self) -> int:
        return self._ends[-1]

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """The rows at the given positions that are used."""
        wanted: dict[int, list[int]] = {}
        for row in torch.as_tensor(rows).tolist():
            part = bisect_right(self._ends, row)
            wanted.setdefault(part, []).append(row - self._ends[part] + len(self._parts[part]))
        found = [self._parts[part].select(own) for part, own in sorted(wanted.items())]
        return Batch.concat([
            batch.with_columns(objects={name: [None] * len(batch) for name in self.columns if name not in batch})
            for batch in [batch for batch in found if len(batch)] or found[:1]
        ])  # fmt: skip


def _opened(name: str, config: Data, tokenizer: PreTrainedTokenizerBase) -> tuple[str, StoredRows]:
    if is_ours(name):
        table = read_table(name)
        return table.data_source, StoredRows.one_by_one(len(table), table.row)
    if config.dataset is not None:
        dataset = own_dataset(name, config, tokenizer)
        if not isinstance(dataset, Indexed):
            raise ConfigError(
                f"data.dataset: {config.dataset} has no __len__ and __getitem__, which data.streaming=true needs.",
                remedy="Add them, or set data.streaming=false.",
            )
        read = partial(own_rows, dataset, name=name, config=config)
        return short_name(Path(name)), StoredRows(len(dataset), lambda indices: [{**row} for row in read(indices)])
    found = locate(name)
    if not found.files:
        return found.data_source, dataset_rows(open_dataset(found, name), name)
    parts = [stored_file(file, name if len(found.files) == 1 else str(file), config) for file in found.files]
    if not any(part.count for part in parts):
        raise DataError(f"'{name}' has no rows.", remedy="Give a file with at least one row, or leave it out.")
    return found.data_source, concatenated(parts)
