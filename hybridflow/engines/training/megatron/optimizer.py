"""Megatron-Core's AdamW over a rank's chunks, with its state whole on each data-parallel rank or divided over them."""

from collections.abc import Sequence

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.megatron.flat_weights import FlatWeights
from hybridflow.engines.training.megatron.model import Chunk


class ChunkOptimizer:
    """Gradients in float32, their norm, and AdamW's step; weight decay is on matrices alone.

    `divided` is Megatron-Core's distributed optimizer (ZeRO-1, arXiv:1910.02054): each data-parallel rank reduces,
    moves and keeps the state of a range of all weights, and gathers the others' ranges after the step.

        optimizer.zero_grad()
        run_pipeline(optimizer.modules, ...)
        norm = optimizer.grad_norm()
        optimizer.step(norm, learning_rate=1e-6)
    """

    def __init__(self, chunks: Sequence[Chunk], config: TransformerConfig, settings: Optimizer, *, divided: bool):
        own = {parameter: parameter.data for chunk in chunks for parameter in chunk.parameters()}
        reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=divided)
        self.modules = [DistributedDataParallel(config, reduction, chunk) for chunk in chunks]
        config.finalize_model_grads_func = _finalize
        self._settings = settings
        self._config = OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.max_grad_norm,
            params_dtype=config.params_dtype,
            bf16=config.bf16,
            use_distributed_optimizer=divided,
        )
        modules: list[MegatronModule] = [*self.modules]
        made = get_megatron_optimizer(self._config, modules, use_gloo_process_groups=False)
        assert isinstance(made, ChainedOptimizer), f"Megatron-Core made a {type(made).__name__}"
        self._chain = made
        self._flat = FlatWeights(self.modules, own)

    def zero_grad(self) -> None:
        """Before a pass with gradients."""
        for module in self.modules:
            module.zero_grad_buffer()
        self._chain.zero_grad()

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm of all ranks' gradients together, before clipping."""
        self._chain.prepare_grads()
        return float(self._chain.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, *, learning_rate: float) -> None:
        """One step along the gradients, clipped to the largest norm allowed; `norm` is theirs."""
        for group in self._chain.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
        if self._settings.max_grad_norm:
            for optimizer in self._chain.chained_optimizers:
                moved: list[Tensor] = [*optimizer.get_parameters()]
                clip_grad_by_total_norm_fp32(moved, self._settings.max_grad_norm, norm)
        self._flat.fill()
        self._chain.step_with_ready_grads()
        self._flat.empty()


def _finalize(modules: list[nn.Module], tokens: Tensor | None = None, **options: object) -> None:
    """Sums gradients over the ranks that share their parameters; they are divided by nothing, as losses are already."""
    finalize_model_grads(modules, None, **options)  # pyright: ignore[reportArgumentType]
