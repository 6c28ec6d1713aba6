"""Columns that a dataflow precomputes for every row before its first step: once, and kept with the run."""

import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.dataflows.interface import Dataflow
from hybridflow.elastic.storage import write_aside
from hybridflow.launch.plan.data_streams import RunData

logger = logging.getLogger(__name__)

FOLDER = "foreknown"
"""Below the run's directory: `train.safetensors` and `held_out.safetensors`."""

_ROWS_AT_ONCE = 512
_OFFSETS = ":offsets"
"""Suffix of the entry that says where the rows of a token column begin."""

Columns = dict[str, Tensor | Ragged]


def with_precomputed(program: Dataflow, data: RunData, directory: Path) -> RunData:
    """The data with the columns of `Dataflow.precompute`; called while the models still have their first weights.

    A resumed run reads them from its directory, if they were computed for the same rows.
    """
    if type(program).precompute is Dataflow.precompute:
        return data
    tables = {"train": data.streams["prompts"].table}
    if data.held_out is not None:
        tables["held_out"] = data.held_out
    found = {name: _kept(directory / FOLDER / f"{name}.safetensors", table) for name, table in tables.items()}
    if any(columns is None for columns in found.values()):
        started = time.perf_counter()
        found = {name: _computed(program, table) for name, table in tables.items()}
        if not any(found.values()):
            return data
        _keep(directory / FOLDER, {name: (tables[name], columns) for name, columns in found.items() if columns})
        logger.info(
            "precomputed columns=%s rows=%d seconds=%.1f directory=%s",
            ",".join(found["train"] or ()), sum(map(len, tables.values())), time.perf_counter() - started,
            directory / FOLDER,
        )  # fmt: skip
    rows, tokens = by_kind(found["train"] or {})
    data.streams["prompts"].add_columns(rows, tokens)
    if data.held_out is None:
        return data
    rows, tokens = by_kind(found["held_out"] or {})
    return replace(data, held_out=data.held_out.with_columns(rows=rows, tokens=tokens))


def by_kind(columns: Columns) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Columns with one value per row, and columns with one value per token."""
    rows = {name: column for name, column in columns.items() if isinstance(column, Tensor)}
    return rows, {name: column for name, column in columns.items() if isinstance(column, Ragged)}


def _computed(program: Dataflow, table: Batch) -> Columns:
    """The columns of all rows, in parts of equal size so that every rank gets some rows of each."""
    table = table.with_columns(rows={"uid": torch.arange(len(table))})
    count = -(-len(table) // _ROWS_AT_ONCE)
    parts = [program.precompute(table.select(rows)) for rows in torch.arange(len(table)).tensor_split(count)]
    kinds = [by_kind(part) for part in parts]
    rows = {name: torch.cat([part[name] for part, _ in kinds]) for name in kinds[0][0]}
    return rows | {name: Ragged.concat([part[name] for _, part in kinds]) for name in kinds[0][1]}


def _keep(folder: Path, found: dict[str, tuple[Batch, Columns]]) -> None:
    with write_aside(folder) as partial:
        for name, (table, columns) in found.items():
            rows, tokens = by_kind(columns)
            for column, ids in tokens.items():
                rows |= {column: ids.values, column + _OFFSETS: ids.offsets}
            save_file(rows, partial / f"{name}.safetensors", metadata={"rows": _fingerprint(table)})


def _kept(file: Path, table: Batch) -> Columns | None:
    if not file.is_file():
        return None
    with safe_open(file, framework="pt") as kept:
        if kept.metadata().get("rows") != _fingerprint(table):
            logger.warning("file=%s was computed for different data; recomputing", file)
            return None
        found = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 (not a dict)
    tokens = {name.removesuffix(_OFFSETS) for name in found if name.endswith(_OFFSETS)}
    rows = {name: column for name, column in found.items() if name.removesuffix(_OFFSETS) not in tokens}
    return rows | {name: Ragged(found[name], found[name + _OFFSETS]) for name in tokens}


def _fingerprint(table: Batch) -> str:
    """A digest of the tokens, in their order."""
    digest = hashlib.sha256()
    for name, column in sorted(table.token_columns.items()):
        digest.update(name.encode())
        digest.update(column.offsets.numpy().tobytes())
        digest.update(column.values.contiguous().numpy().tobytes())
    return digest.hexdigest()
