"""What the run computes on: the devices of the Ray cluster that it joins, else those of this machine."""

import logging
import os

import torch

from hybridflow.config.derived import num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind, Device
from hybridflow.controller.backends import check_cluster, joined_gpus
from hybridflow.controller.backends.interface import RAY_ADDRESS
from hybridflow.errors import ResourceError
from hybridflow.launch.plan.roles import backend_kind

logger = logging.getLogger(__name__)


def find_device(config: Experiment) -> str:
    """The device that `trainer.device` chooses, `cpu` or `cuda`. Logs the choice.

    Raises `ResourceError` if cuda is required and there is none, if this machine has fewer GPUs than the run needs, if
    a run on several nodes has no Ray cluster, or if another program holds a port that Ray needs.
    """
    kind = backend_kind(config)
    check_cluster(kind.name, config.trainer.nodes)
    num_gpus = None if config.trainer.device is Device.cpu else joined_gpus(kind.name)
    device, wanted = _device(config.trainer.device, num_gpus), num_devices(config)
    if device == "cuda" and num_gpus is None and wanted > torch.cuda.device_count():
        raise ResourceError(
            f"trainer.devices={config.trainer.devices}, and this machine has {torch.cuda.device_count()} GPUs.",
            remedy=f"Lower trainer.devices, set {RAY_ADDRESS} to a cluster with more, or use trainer.device=cpu.",
        )
    where = _where(kind, device, wanted, num_gpus)
    logger.info("device=%s (trainer.device=%s): %s", device, config.trainer.device.name, where)
    return device


def _where(kind: BackendKind, device: str, wanted: int, num_gpus: int | None) -> str:
    """`4 GPUs of this machine`, or where else the `wanted` devices are; a CPU device is one process."""
    if device == "cuda":
        gpus = f"{wanted} GPU{'' if wanted == 1 else 's'}"
        return f"{gpus} of this machine" if num_gpus is None else f"{gpus} of the {num_gpus} in the Ray cluster"
    processes = f"{wanted} process{'' if wanted == 1 else 'es'}"
    if kind is BackendKind.ray and os.environ.get(RAY_ADDRESS):
        return f"{processes} on the Ray cluster at {RAY_ADDRESS}={os.environ[RAY_ADDRESS]}"
    return f"{processes} on this machine"


def _device(wanted: Device, num_gpus: int | None) -> str:
    """`cpu` or `cuda`; `num_gpus` are those of the cluster, None where the run uses this machine."""
    if wanted is Device.cpu:
        return "cpu"
    if num_gpus is None:
        has_cuda, found = torch.cuda.is_available(), "PyTorch finds no CUDA device here"
        remedy = "install a CUDA build of PyTorch and check nvidia-smi"
    else:
        has_cuda, found = num_gpus > 0, "the Ray cluster has no GPU"
        remedy = (
            "start its nodes with GPUs (ray status lists them; ray start --num-gpus=N where Ray does not find them)"
        )
    if wanted is Device.cuda and not has_cuda:
        raise ResourceError(f"trainer.device=cuda, and {found}.", remedy=f"Use trainer.device=cpu, or {remedy}.")
    return "cuda" if has_cuda else "cpu"
