"""Stand-ins for workers, which return made-up rows of the right kinds, the same every time."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import get_type_hints

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.columns import COLUMNS, ColumnSpec, Kind
from hybridflow.controller.transfer import specs_of
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.observability.metrics import Metrics

PROMPTS = 4
"""Prompts a batch."""

_UNKNOWN = ColumnSpec(Kind.row, torch.float32, "", "")
_OF_DATA = {
    "prompts": (),
    "demonstrations": ("response_ids", "response_mask"),
    "preferences": ("chosen_ids", "rejected_ids", "margin"),
    "labelled": ("response_ids", "response_mask", "is_chosen"),
}
"""Columns that each kind of data has in addition to those of prompts."""

_GOLDEN_RATIO = 0.618034


class StandIn(Worker):
    """Answers every call of the worker class that it plays: with the columns promised, or with no metrics.

    `functions` are the labels of the reward functions that the role scores with.
    """

    def __init__(self, context: WorkerContext, *, plays: type[Worker], functions: Sequence[str] = ()) -> None:
        super().__init__(context)
        self._plays = plays
        self._specs = specs_of(plays)
        self._functions = functions
        self._num_answers = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._answer, name)

    def _answer(self, name: str, *args: object, **kwargs: object) -> object:
        provides = self._specs[name].provides
        if not provides:
            method = getattr_static(self._plays, name)
            assert isinstance(method, FunctionType), f"{self._plays.__name__}.{name} is marked, and is not a function"
            return {} if get_type_hints(method).get("return") == Metrics else None
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Batch)]
        self._num_answers += 1
        labels = self._functions if "scores" in provides else ()
        names = [*provides, *(f"rewards/{label}" for label in labels)]
        return made_up(names, batches[0] if batches else None, start=1000 * self._num_answers)


def made_up(names: Iterable[str], given: Batch | None, *, start: int = 0) -> Batch:
    """Columns by name, of the rows of a batch; numbers differ from row to row. Tokens are as many as its responses'."""
    num_rows = PROMPTS if given is None else len(given)
    lengths = _response_lengths(given, num_rows)
    rows: dict[str, Tensor] = {}
    tokens: dict[str, Ragged] = {}
    objects: dict[str, list] = {}
    for name in names:
        column = COLUMNS.get(name, _UNKNOWN)
        dtype = column.dtype or torch.float32
        if column.kind is Kind.tokens:
            tokens[name] = Ragged.from_lengths(_numbers(int(lengths.sum()), dtype, start), lengths)
        elif column.kind is Kind.object:
            objects[name] = [name] * num_rows
        else:
            numbers = _numbers(num_rows, dtype, start)
            rows[name] = numbers[:, None] if name == "components" else numbers
    return Batch.of(rows=rows, tokens=tokens, objects=objects)


class MadeUpStream:
    """An endless stream of batches of one kind of data.

    `rows` are some of the run's own data, whose further columns every batch has too.
    """

    def __init__(self, data: str, rows: Batch | None = None) -> None:
        self._data = data
        self._rows = None if rows is None else rows.select([place % len(rows) for place in range(PROMPTS)])
        self._position = 0
        self.columns: tuple[str, ...] = ()
        """The columns of the last batch; none before the first."""

    def next(self) -> Batch:
        """The next few rows; their `uid` continues from the last."""
        start, self._position = self._position, self._position + PROMPTS
        columns = ("prompt_ids", "prompt", "answer", "data_source", *_OF_DATA.get(self._data, ()))
        batch = made_up(columns, None).with_columns(rows={"uid": torch.arange(start, self._position)})
        batch = batch if self._rows is None else self._rows.join(batch)
        self.columns = tuple(batch.columns)
        return batch


def _response_lengths(given: Batch | None, num_rows: int) -> Tensor:
    known = {} if given is None else given.token_columns
    for name in ("response_ids", "response_mask", *(name for name in known if name != "prompt_ids")):
        if name in known:
            return known[name].lengths
    return torch.arange(num_rows) % 3 + 2


def _numbers(count: int, dtype: torch.dtype, start: int) -> Tensor:
    """Floats spread over 0 to 1, integers 0, truths False."""
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype)
    return (torch.arange(start, start + count).double() * _GOLDEN_RATIO % 1.0).to(dtype)
