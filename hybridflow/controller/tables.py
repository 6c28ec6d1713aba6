"""Tables: the columns that one stage added, in the shards its ranks made. The driver holds names and handles."""

from collections.abc import Sequence
from typing import Protocol

from hybridflow.batch import Batch
from hybridflow.controller.backends.interface import Backend, Pending, Stored
from hybridflow.controller.packets import Packet, Summary


class Table(Protocol):
    """Some columns of the same rows, in shards laid end to end."""

    @property
    def declared(self) -> tuple[str, ...]:
        """Columns it is known to have before its stage has answered."""
        ...

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard; waits for the stage where only its answer can tell."""
        ...

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        ...

    @property
    def settled(self) -> bool:
        """Whether the summaries are here, so that reading them does not wait."""
        ...

    def summaries(self) -> Sequence[Summary]:
        """What each shard holds; waits for the stage."""
        ...

    def stored(self, shard: int, column: str) -> Stored:
        """One declared column of a shard."""
        ...

    def rest(self, shard: int) -> Stored | None:
        """A shard's further columns and its metadata; None where there are none."""
        ...

    def pending(self) -> Sequence[Pending]:
        """The calls that are making it."""
        ...


class DriverTable:
    """A batch of this process: a column is stored for workers when it is first asked for."""

    def __init__(self, batch: Batch, backend: Backend) -> None:
        self._columns = batch.by_name
        self._summary = Summary.of(self._columns, len(batch), batch.meta)
        self._backend = backend
        self._stored: dict[str, Stored] = {}
        self.declared = tuple(self._columns)
        self.sizes = [len(batch)]
        self.num_shards = 1
        self.settled = True

    def summaries(self) -> Sequence[Summary]:
        """The batch's own numbers."""
        return [self._summary]

    def stored(self, shard: int, column: str) -> Stored:
        """One column, put once."""
        if column not in self._stored:
            self._stored[column] = self._backend.put(Packet({column: self._columns[column]}, {}))
        return self._stored[column]

    def rest(self, shard: int) -> Stored | None:
        """Nothing."""
        return None

    def pending(self) -> Sequence[Pending]:
        """Nothing."""
        return []


class StageTable:
    """The answers of one stage, one shard per call."""

    def __init__(
        self, calls: Sequence[Pending], declared: tuple[str, ...], sizes: list[int] | None, backend: Backend
    ) -> None:
        self.declared = declared
        self.num_shards = len(calls)
        self._calls = calls
        self._sizes = sizes
        self._backend = backend
        self._summaries: list[Summary] | None = None

    @property
    def settled(self) -> bool:
        """Whether the stage has answered."""
        return self._summaries is not None

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard."""
        if self._sizes is None:
            self._sizes = [summary.rows for summary in self.summaries()]
        return self._sizes

    def summaries(self) -> Sequence[Summary]:
        """The small part of the answers."""
        if self._summaries is None:
            values = self._backend.wait(self._calls)
            self._summaries = [value for value in values if isinstance(value, Summary)]
            assert len(self._summaries) == len(values), f"not summaries: {values}"
        return self._summaries

    def stored(self, shard: int, column: str) -> Stored:
        """One declared column of a shard."""
        return self._calls[shard].packets[self.declared.index(column)]

    def rest(self, shard: int) -> Stored | None:
        """The packet of columns the stage added beyond those declared, and its metadata."""
        return self._calls[shard].packets[-1]

    def pending(self) -> Sequence[Pending]:
        """The stage's calls."""
        return self._calls


class ConcatTable:
    """Several tables with the same columns, end to end."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._places = [(table, shard) for table in tables for shard in range(table.num_shards)]
        self.declared = tuple(name for name in tables[0].declared if all(name in table.declared for table in tables))
        self.num_shards = len(self._places)

    @property
    def settled(self) -> bool:
        """Whether all have answered."""
        return all(table.settled for table in self._tables)

    @property
    def sizes(self) -> list[int]:
        """Rows of each shard."""
        return [size for table in self._tables for size in table.sizes]

    def summaries(self) -> Sequence[Summary]:
        """Those of all tables, in order."""
        return [summary for table in self._tables for summary in table.summaries()]

    def stored(self, shard: int, column: str) -> Stored:
        """One declared column of a shard."""
        table, inner = self._places[shard]
        return table.stored(inner, column)

    def rest(self, shard: int) -> Stored | None:
        """A shard's further columns."""
        table, inner = self._places[shard]
        return table.rest(inner)

    def pending(self) -> Sequence[Pending]:
        """The calls of all tables."""
        return [call for table in self._tables for call in table.pending()]
