"""Rows of several files as one table."""

from collections.abc import Sequence

from hybridflow.batch import Batch
from hybridflow.errors import DataError

_WRITTEN_AS = {"ref_sums": "ref_chosen_logps, ref_rejected_logps"}
"""Columns that have other names in the files that they come from."""


def joined(parts: Sequence[Batch], files: Sequence[str]) -> Batch:
    """The rows of all files, in order; a row of a file that lacks another file's object column has None there."""
    names = dict.fromkeys(name for part in parts for name in part.objects)
    filled = []
    for part, file in zip(parts, files, strict=True):
        _check_same(parts[0], files[0], part, file)
        objects = {name: part.objects.get(name, [None] * len(part)) for name in names}
        filled.append(Batch.of(rows=part.row_columns, tokens=part.token_columns, objects=objects, meta=part.meta))
    return Batch.concat(filled)


def _check_same(first: Batch, first_file: str, part: Batch, file: str) -> None:
    """Numbers and tokens cannot be absent from some of the rows."""
    own = {*first.row_columns, *first.token_columns}
    found = {*part.row_columns, *part.token_columns}
    for more, fewer, has, lacks in ((own, found, first_file, file), (found, own, file, first_file)):
        if further := ", ".join(_WRITTEN_AS.get(name, name) for name in sorted(more - fewer)):
            raise DataError(
                f"'{has}' has the columns {further}, and '{lacks}' does not.",
                remedy="Give both files the same columns: add them to the one, or take them out of the other.",
            )
