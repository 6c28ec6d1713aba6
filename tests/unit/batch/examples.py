"""Random ragged rows, and batches with a column of every kind."""

import torch
from hypothesis import strategies as st

from hybridflow.batch import Batch, Ragged

rows_of_tokens = st.lists(st.lists(st.integers(-5, 99), max_size=6), min_size=1, max_size=7)


def ragged(rows: list[list[int]]) -> Ragged:
    """Rows of whole numbers."""
    return Ragged.from_rows(rows, torch.int64)


def plain(column: Ragged) -> list[list[float]]:
    """The rows as lists."""
    return [row.tolist() for row in column.rows()]


def batch_of(rows: list[list[int]]) -> Batch:
    """A batch with row, token and object columns that all follow from the position of a row."""
    size = len(rows)
    return Batch.of(
        rows={"uid": torch.arange(100, 100 + size), "grid": torch.arange(2.0 * size).view(size, 2)},
        tokens={
            "prompt_ids": ragged(rows),
            "response_mask": Ragged.from_rows([[1.0] * (i % 3) for i in range(size)], torch.float32),
        },
        objects={"answer": [f"answer {i}" for i in range(size)]},
        meta={"temperature": 0.7},
    )


def contents(batch: Batch) -> list[tuple]:
    """Every row of every column as plain values."""
    columns = [batch.row(name).tolist() for name in sorted(batch.row_columns)]
    columns += [plain(batch.tokens(name)) for name in sorted(batch.token_columns)]
    columns += [batch.objects[name] for name in sorted(batch.objects)]
    return list(zip(*columns, strict=True))
