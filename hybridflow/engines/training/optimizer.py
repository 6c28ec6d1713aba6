"""AdamW: parameter groups, float32 copies of weights, and the learning rate at each step."""

# pyright: reportPrivateImportUsage=false

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridflow.config.training import Optimizer, Schedule
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.state_files import ShardsOf, SteppedTensor
from hybridflow.engines.training.streamed_state import StreamedState, narrowed


class MasterAdamW(torch.optim.AdamW):
    """AdamW that keeps float32 copies of weights in lower precision: it steps the copies, then rounds into the weights.

    In bfloat16, numbers near 0.1 are 5e-4 apart, so that steps of 1e-6 would all be lost (arXiv:1710.03740, sec. 3.1).
    Weights in float32 are stepped directly. Moments and copies can be in host memory between steps:

        optimizer.offload(pool)
        optimizer.step()            # bucket by bucket
        optimizer.onload()
    """

    def __init__(self, groups: Sequence[dict], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.weight_of: dict[Tensor, Tensor] = {}
        self._streamed: StreamedState | None = None
        masters = [{**group, "params": [self._master(weight) for weight in group["params"]]} for group in groups]
        super().__init__(masters, lr=lr, betas=betas, eps=eps, fused=True)

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step along the gradients of the weights. The result does not depend on where the state is."""
        if self._streamed is None:
            self._step_on([parameter for group in self.param_groups for parameter in group["params"]])
        else:
            self._streamed.step(self, self._step_on)

    def step_at(self, learning_rate: float) -> None:
        """One step with a learning rate."""
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()

    def offload(self, pool: HostPool) -> None:
        if self._streamed is None:
            self._streamed = StreamedState(self.weight_of, pool)
        self._streamed.settle(self)

    def onload(self) -> None:
        if self._streamed is not None:
            self._streamed.onload(self)
            self._streamed = None

    def settle(self) -> None:
        if self._streamed is not None:
            self._streamed.settle(self)

    def stepped_tensors(self, trained: Iterable[tuple[Tensor, ShardsOf]]) -> Iterator[SteppedTensor]:
        """The tensors that it steps for the trained weights, each given with the shards in it."""
        copies = {weight: copy for copy, weight in self.weight_of.items()}
        return (SteppedTensor(weight, copies.get(weight, weight), self, shards_of) for weight, shards_of in trained)

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


def make_optimizer(trained: Sequence[Tensor], config: Optimizer) -> MasterAdamW:
    """Fused AdamW over parameters, with weight decay on matrices only."""
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


def learning_rate(step: int, *, optimizer: Optimizer, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then constant, or decaying to 0 at the end."""
    peak = optimizer.learning_rate
    if step < optimizer.warmup_steps:
        return peak * (step + 1) / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / max(1, total_steps - optimizer.warmup_steps)
    progress = min(1.0, max(0.0, progress))
    if optimizer.schedule is Schedule.linear:
        return peak * (1.0 - progress)
    if optimizer.schedule is Schedule.cosine:
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


@contextmanager
def contiguous(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Replaces the memory of each non-contiguous tensor by a contiguous copy, and writes the values back on exit.

    Parameters bound to a rollout engine can be columns of a wider tensor. torch's fused AdamW ignores strides and would
    write past them. Nothing is written back if the block raises.
    """
    places = {tensor: tensor.data for tensor in tensors if not tensor.is_contiguous()}
    for tensor, place in places.items():
        tensor.data = place.contiguous()
    try:
        yield
        with torch.no_grad():
            for tensor, place in places.items():
                place.copy_(tensor.data)
    finally:
        for tensor, place in places.items():
            tensor.data = place
