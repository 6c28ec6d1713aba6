"""What the run computes on: asked of the Ray cluster where one is joined, else of this machine."""

import logging

import torch

from hybridflow.config.derived import num_devices
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import Device
from hybridflow.controller.backends import joined_gpus
from hybridflow.controller.backends.ports import ADDRESS
from hybridflow.errors import ResourceError
from hybridflow.launch.roles import backend_kind

logger = logging.getLogger(__name__)


def device_name(config: Experiment) -> str:
    """cpu or cuda. Raises `ResourceError` when cuda is asked for and there is none."""
    wanted = config.trainer.device
    if wanted is Device.cpu:
        return "cpu"
    num_gpus = joined_gpus(backend_kind(config).name)
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


def check_device(config: Experiment) -> str:
    """`device_name`, which is logged. Raises `ResourceError` where this machine has fewer GPUs than the run needs."""
    device, wanted = device_name(config), num_devices(config)
    num_gpus = None if device == "cpu" else joined_gpus(backend_kind(config).name)
    where = "this machine" if num_gpus is None else f"the Ray cluster, which has {num_gpus} GPUs"
    if device == "cuda" and num_gpus is None and wanted > torch.cuda.device_count():
        raise ResourceError(
            f"trainer.devices={config.trainer.devices}, and this machine has {torch.cuda.device_count()} GPUs.",
            remedy=f"Lower trainer.devices, set {ADDRESS} to a cluster with more, or use trainer.device=cpu.",
        )
    logger.info("device=%s (trainer.device=%s) devices=%d of %s", device, config.trainer.device.name, wanted, where)
    return device
