"""A collected batch in the driver's part of a checkpoint: its tensors as bytes, its prompts' objects left out."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.wire import Ragged, as_bytes, from_bytes
from hybridflow.controller.backends.interface import Backend
from hybridflow.controller.batch_ref import BatchRef

SavedState = dict[str, Any]
"""JSON values, and bytes."""


def as_state(batch: BatchRef, prompts: Batch) -> SavedState:
    """The columns and companions of a batch as JSON with bytes, by the stages that added them.

    Objects that are columns of the prompts are found again by `uid`, if the stage has it; others must be JSON values.
    """
    return {
        "stages": [
            {
                "declared": declared,
                "rows": {name: _packed(column) for name, column in found.row_columns.items()},
                "tokens": {name: (_packed(c.values), c.lengths.tolist()) for name, c in found.token_columns.items()},
                "objects": {n: c for n, c in found.objects.items() if "uid" not in found or n not in prompts},
                "meta": dict(found.meta),
            }
            for declared, found in batch.stages()
        ],
        "meta": dict(batch.meta),
        "companions": {name: as_state(other, prompts) for name, other in batch.companions.items()},
    }


def from_state(state: SavedState, prompts: Batch, backend: Backend) -> BatchRef:
    """The batch that `as_state` saved, with its companions."""
    found = BatchRef.of_stages([(s["declared"], _stage(s, prompts)) for s in state["stages"]], backend)
    found = found.with_meta(**state.get("meta", {}))
    companions = {name: from_state(other, prompts, backend) for name, other in state["companions"].items()}
    return found.with_companions(**companions) if companions else found


def _stage(state: SavedState, prompts: Batch) -> Batch:
    rows = {name: _unpacked(packed) for name, packed in state["rows"].items()}
    tokens = {
        name: Ragged.from_lengths(_unpacked(packed), torch.tensor(lengths, dtype=torch.int64))
        for name, (packed, lengths) in state["tokens"].items()
    }
    objects = dict(state["objects"])
    if "uid" in rows:
        place = {uid: row for row, uid in enumerate(prompts.row("uid").tolist())}
        objects |= prompts.select([place[uid] for uid in rows["uid"].tolist()]).objects
    return Batch.of(rows=rows, tokens=tokens, objects=objects, meta=state["meta"])


def _packed(values: Tensor) -> tuple[str, list[int], bytes]:
    """The dtype, shape and bytes of a tensor."""
    data, dtype, shape = as_bytes(values)
    return dtype, list(shape), data.tobytes()


def _unpacked(packed: tuple[str, list[int], bytes]) -> Tensor:
    dtype, shape, data = packed
    return from_bytes((np.frombuffer(bytearray(data), dtype=np.uint8), dtype, tuple(shape)))
