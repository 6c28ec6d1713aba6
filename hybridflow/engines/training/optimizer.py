"""AdamW: its parameter groups, and its float32 copies of weights."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.contiguous import contiguous


class MasterAdamW(torch.optim.AdamW):
    """AdamW that moves float32 copies of weights kept in fewer bits, and then rounds the copies into the weights.

    In bfloat16 numbers near 0.1 are 5e-4 apart, so that steps of 1e-6 would all be lost (arXiv:1710.03740, sec. 3.1).
    Weights in float32 are moved themselves.
    """

    def __init__(self, groups: Sequence[dict], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.weight_of: dict[Tensor, Tensor] = {}
        masters = [{**group, "params": [self._master(weight) for weight in group["params"]]} for group in groups]
        super().__init__(masters, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step along the gradients of the weights."""
        for master, weight in self.weight_of.items():
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        with contiguous(parameter for group in self.param_groups for parameter in group["params"]):
            super().step()
        for master, weight in self.weight_of.items():
            master.grad = None
            weight.copy_(master)

    def _master(self, weight: Tensor) -> Tensor:
        if weight.dtype is torch.float32:
            return weight
        master = weight.detach().float().requires_grad_()
        self.weight_of[master] = weight
        return master


def make_optimizer(model: nn.Module, config: Optimizer) -> MasterAdamW:
    """AdamW over a model's parameters."""
    return optimizer_over([parameter for parameter in model.parameters() if parameter.requires_grad], config)


def optimizer_over(trained: Sequence[Tensor], config: Optimizer) -> MasterAdamW:
    """AdamW with weight decay on matrices only, in one fused kernel."""
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return MasterAdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )


@torch.no_grad()
def move_optimizer(optimizer: MasterAdamW, device: torch.device) -> None:
    """Copies moments and float32 copies to a device, and lets go of where they were; the weights stay."""
    for state in optimizer.state.values():
        for name, tensor in state.items():
            state[name] = tensor.to(device, copy=True)
    for master in optimizer.weight_of:
        master.data = master.data.to(device, copy=True)
