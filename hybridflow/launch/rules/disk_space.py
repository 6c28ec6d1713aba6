"""Room on the disk for what a run writes, looked at before it starts rather than at its first checkpoint."""

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Trainer
from hybridflow.config.model import Dtype
from hybridflow.config.training import Lora
from hybridflow.elastic.checkpoint import steps_below
from hybridflow.errors import ResourceError
from hybridflow.launch.plan.roles import RoleSpec
from hybridflow.models.geometry import ModelGeometry, parameter_count, read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.models.names.rules import canonical_weights

_LOGS_BYTES = 1 << 20
_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_FLOAT32_COPIES = 3
"""Weights, and AdamW's two moments of each; weights in bfloat16 come in addition to their float32 copies."""


def check_room(config: Experiment, specs: Sequence[RoleSpec], directory: Path) -> None:
    """Raises `ResourceError` when there is no room for the checkpoints that lie on the disk at once.

    Those are `trainer.keep_checkpoints` and the one being written: an old one is deleted only after it.
    """
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return  # it cannot be a run directory, as its opening will tell
    _check_directories(directory, nearest)
    free = shutil.disk_usage(nearest).free
    checkpoints, size = _further_checkpoints(config.trainer, directory), sum(map(_saved_bytes, specs))
    needed = _LOGS_BYTES + checkpoints * size
    if free < needed:
        writes = f"{checkpoints} checkpoint{'s' * (checkpoints > 1)} of {_megabytes(size)}" if checkpoints else "logs"
        raise ResourceError(
            f"The disk of trainer.run_dir={directory} is too full: {_megabytes(free)} are free, and the run writes"
            f" {writes}, {_megabytes(needed)} in total before it deletes old ones.",
            remedy="Free space there, set trainer.run_dir to a larger disk, or lower trainer.keep_checkpoints="
            f"{config.trainer.keep_checkpoints}; trainer.save_every=0 saves nothing.",
        )


def _check_directories(directory: Path, nearest: Path) -> None:
    """Raises `ResourceError` where no directory can be made (as in /proc), which a full disk does not explain."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".hybridflow-", dir=nearest))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return
        raise ResourceError(
            f"The run directory '{directory}' cannot be written: {error.strerror or error}, for a new directory in"
            f" {nearest}.",
            remedy="Set trainer.run_dir to a directory you may write to, on a disk with free space.",
        ) from error


def _further_checkpoints(trainer: Trainer, directory: Path) -> int:
    """How many checkpoints will lie on the disk at once, beside those of this run that lie there already."""
    if not trainer.save_every:
        return 0
    in_all = -(-trainer.total_steps // trainer.save_every)
    there = 0 if trainer.resume == "never" else len(steps_below(directory / "checkpoints"))
    return max(1, min(in_all, trainer.keep_checkpoints + 1) - there)


def _saved_bytes(spec: RoleSpec) -> int:
    if not spec.is_trained or spec.model is None:
        return 0
    geometry = read_geometry(resolve_model_path(str(spec.model.path)))
    if spec.training is not None and spec.training.lora.rank:
        return _FLOAT32_COPIES * _FLOAT32_BYTES * _adapter_elements(geometry, spec.training.lora)
    beside = _BFLOAT16_BYTES if spec.model.dtype is Dtype.bfloat16 else 0
    return parameter_count(geometry) * (beside + _FLOAT32_COPIES * _FLOAT32_BYTES)


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
