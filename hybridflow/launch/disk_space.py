"""Room on the disk for what a run writes, looked at before it starts rather than at its first checkpoint."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config.experiment import Experiment
from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora
from hybridflow.errors import ResourceError
from hybridflow.launch.roles import RoleSpec
from hybridflow.models.accounting import weight_bytes
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.names.rules import canonical_weights

_LOGS_BYTES = 1 << 20
_FLOAT32_BYTES = 4
_SAVED_COPIES = 3
"""Weights, and AdamW's two moments of each."""


def check_room(config: Experiment, specs: Sequence[RoleSpec], directory: Path) -> None:
    """Raises `ResourceError` when there is no room for one checkpoint; the one before is deleted only after it."""
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return  # it cannot be a run directory, as its opening will tell
    free = shutil.disk_usage(nearest).free
    needed = _LOGS_BYTES + (sum(map(_saved_bytes, specs)) if config.trainer.save_every else 0)
    if free < needed:
        raise ResourceError(
            f"The disk of trainer.run_dir={directory} is too full: {_megabytes(free)} are free, and"
            f" {'one checkpoint takes' if config.trainer.save_every else 'the logs take'} {_megabytes(needed)}.",
            remedy="Free space there, or set trainer.run_dir to a larger disk; trainer.save_every=0 saves nothing.",
        )


def _saved_bytes(spec: RoleSpec) -> int:
    if not spec.is_trained or spec.model is None:
        return 0
    geometry = read_geometry(resolve_model_path(str(spec.model.path)))
    if spec.training is not None and spec.training.lora.rank:
        return _SAVED_COPIES * _FLOAT32_BYTES * _adapter_elements(geometry, spec.training.lora)
    width = 2 if spec.model.dtype is Dtype.bfloat16 else 4
    return _SAVED_COPIES * weight_bytes(geometry, bytes_per_parameter=width)


def _adapter_elements(geometry: ModelGeometry, lora: Lora) -> int:
    """Of an adapter's matrices: both together have a row or column for each row and each column of a weight."""
    linear = {
        name.removesuffix(".weight"): spec.shape
        for name, spec in canonical_weights(geometry).items()
        if ".layers." in name and ".experts." not in name and len(spec.shape) == 2
    }
    chosen = [shape for name, shape in linear.items() if not lora.targets or name.endswith(tuple(lora.targets))]
    return lora.rank * sum(sum(shape) for shape in chosen)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
