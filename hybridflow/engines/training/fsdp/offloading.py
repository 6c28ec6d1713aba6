"""Shards and optimizer state that wait in another device's memory (not run on a GPU yet)."""

from collections.abc import Iterable

import torch

from hybridflow.engines.training.fsdp.sharding import HeldParameter
from hybridflow.engines.training.optimizer import MasterAdamW


def move_parameters(parameters: Iterable[HeldParameter], device: torch.device) -> None:
    """Copies each piece to a device and lets go of where it was; those that a rollout engine shares stay."""
    for parameter in parameters:
        if not parameter.is_bound:
            parameter.place(parameter.memory.to(device, copy=True))


@torch.no_grad()
def move_optimizer(optimizer: MasterAdamW, device: torch.device) -> None:
    """The same of moments and float32 copies; weights that are their own copies are not touched."""
    for state in optimizer.state.values():
        for name, tensor in state.items():
            state[name] = tensor.to(device, copy=True)
    for master in optimizer.weight_of:
        master.data = master.data.to(device, copy=True)
