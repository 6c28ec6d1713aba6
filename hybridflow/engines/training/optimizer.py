"""AdamW: its parameter groups, and its float32 copies of weights."""

# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.contiguous import contiguous
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.streamed_state import StreamedState, narrowed


class MasterAdamW(torch.optim.AdamW):
    """AdamW that moves float32 copies of weights kept in fewer bits, and then rounds the copies into the weights.

    In bfloat16 numbers near 0.1 are 5e-4 apart, so that steps of 1e-6 would all be lost (arXiv:1710.03740, sec. 3.1).
    Weights in float32 are moved themselves. Moments and copies can wait in the host's memory between steps:

        optimizer.rest(shelf)
        optimizer.step()            # bucket by bucket
        optimizer.bring_back()
    """

    def __init__(self, groups: Sequence[dict], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.weight_of: dict[Tensor, Tensor] = {}
        self._streamed: StreamedState | None = None
        masters = [{**group, "params": [self._master(weight) for weight in group["params"]]} for group in groups]
        super().__init__(masters, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step along the gradients of the weights. The numbers do not depend on where the state waits."""
        if self._streamed is None:
            self._step_on([parameter for group in self.param_groups for parameter in group["params"]])
        else:
            self._streamed.step(self._step_on)

    def step_at(self, learning_rate: float) -> None:
        """One step with a learning rate."""
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()

    def rest(self, shelf: HostShelf) -> None:
        """Takes moments and float32 copies to the host; `step` brings them to the device a bucket at a time."""
        if self._streamed is None:
            self._streamed = StreamedState(self, self.weight_of, shelf)
        self._streamed.settle()

    def bring_back(self) -> None:
        """Takes them to the device for good."""
        if self._streamed is not None:
            self._streamed.bring_back()
            self._streamed = None

    def settle(self) -> None:
        """To be called when state was made or replaced from outside: takes it to where the rest is."""
        if self._streamed is not None:
            self._streamed.settle()

    def _step_on(self, parameters: Sequence[Tensor]) -> None:
        copies = [parameter for parameter in parameters if parameter in self.weight_of]
        weights = [self.weight_of[copy] for copy in copies]
        for copy, weight in zip(copies, weights, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.to(copy.dtype)
        with narrowed(self, parameters), contiguous(parameters):
            super().step()
        for copy in copies:
            copy.grad = None
        if copies:
            torch._foreach_copy_([weight.data for weight in weights], [copy.data for copy in copies])

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
