"""Megatron-Core's AdamW for a rank's chunks, with its state replicated or sharded over data-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.megatron.model import Chunk
from hybridflow.engines.training.megatron.optimizer_state import (
    FlatWeights,
    gradient_buffers,
    stepped_pairs,
    stepped_range,
    stepped_tensors,
)
from hybridflow.engines.training.megatron.parameters import held_parameters
from hybridflow.engines.training.optimizer import contiguous
from hybridflow.engines.training.state_files import SteppedTensor
from hybridflow.engines.training.streamed_state import StreamedState, narrowed


class ChunkOptimizer:
    """Float32 gradients, their norm, and AdamW steps; weight decay applies to matrices only.

    `divided` selects Megatron-Core's distributed optimizer (ZeRO-1, arXiv:1910.02054): each data-parallel rank reduces
    and steps one range of all weights, keeps its state, and gathers the other ranges after the step. `replicas` is the
    number of data-parallel ranks.

        optimizer.zero_grad()
        with optimizer.reducing():
            run_pipeline(optimizer.modules, ..., with_gradient=True)
        norm = optimizer.grad_norm()
        optimizer.step(norm, learning_rate=1e-6)
    """

    def __init__(
        self, chunks: Sequence[Chunk], config: TransformerConfig, settings: Optimizer, *, divided: bool, replicas: int
    ) -> None:
        self._part_of = dict(held_parameters(chunks))
        own = {parameter: parameter.data for parameter in self._part_of}
        reduction = reduction_config(divided=divided, replicas=replicas)
        self.modules = [DistributedDataParallel(config, reduction, chunk) for chunk in chunks]
        config.finalize_model_grads_func = _finalize
        self._model_config = config
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
        self._streamed: list[StreamedState] = []
        """One per optimizer of the chain, while its state is in host memory."""

    def zero_grad(self) -> None:
        """Zeroes the gradients before a pass, and allocates their memory if it was freed."""
        for buffer in gradient_buffers(self.modules):
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        for module in self.modules:
            module.zero_grad_buffer()
        self._chain.zero_grad()

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Within it, a backward pass sums gradients over data-parallel ranks, each bucket as soon as it is complete.

        All microbatches but the last accumulate without communication. Later pipeline stages, which finish their
        backward passes first, reduce at the end, as in Megatron-Core's training loop. Passes without gradients must not
        run within it: a forward-only schedule never leaves `no_sync`.
        """
        if not any(module.ddp_config.overlap_grad_reduce for module in self.modules):
            yield
            return
        config = self._model_config
        no_sync: list[Callable[[], AbstractContextManager[None]]] = [module.no_sync for module in self.modules]
        config.no_sync_func = _one_or_all(no_sync)  # pyright: ignore[reportAttributeAccessIssue]
        config.grad_sync_func = _one_or_all([module.start_grad_sync for module in self.modules])  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            config.no_sync_func = config.grad_sync_func = None

    def free_gradients(self) -> None:
        """Frees the memory of the gradients until the next pass."""
        self._chain.zero_grad()
        for buffer in gradient_buffers(self.modules):
            buffer.offload_to_cpu(move_params=False, move_grads=True)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm of the gradients of all ranks, before clipping."""
        with self._stand_ins():
            self._chain.prepare_grads()
        return float(self._chain.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, *, learning_rate: float) -> None:
        """One step with gradients of norm `norm`, which are clipped to `max_grad_norm`.

        The result does not depend on where the state is.
        """
        for group in self._chain.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self._settings.weight_decay * group["wd_mult"]
            if "fused" in group:
                group["fused"], group["foreach"] = True, False
        if self._settings.max_grad_norm:
            for optimizer in self._chain.chained_optimizers:
                moved: list[Tensor] = [*optimizer.get_parameters()]
                clip_grad_by_total_norm_fp32(moved, self._settings.max_grad_norm, norm)
        self._flat.fill()
        if self._streamed:
            self._step_in_buckets()
        else:
            with contiguous(tensor for group in self._chain.param_groups for tensor in group["params"]):
                self._chain.step_with_ready_grads()
        self._flat.empty()

    def offload(self, pool: HostPool) -> None:
        """Moves moments and float32 copies to the host; `step` brings them to the device bucket by bucket.

        Gradients are dropped, and their memory is freed.
        """
        self.free_gradients()
        if not self._streamed:
            copies = [stepped.tensor for stepped in self.stepped_tensors() if stepped.is_copy]
            self._streamed = [StreamedState(copies, pool) for _ in self._chain.chained_optimizers]
        self.settle()

    def onload(self) -> None:
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=False):
            state.onload(optimizer.optimizer)
        self._streamed = []

    def stepped_tensors(self) -> Iterator[SteppedTensor]:
        """The tensors that AdamW steps on this rank."""
        return stepped_tensors(self._chain, self._part_of)

    def settle(self) -> None:
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=False):
            state.settle(optimizer.optimizer)

    def _step_in_buckets(self) -> None:
        """Like the chain's `step_with_ready_grads`, with one bucket of the state on the device at a time."""
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=True):
            inner = optimizer.optimizer
            counted: dict[str, int] = {}
            targets = {
                tensor: stepped_range(optimizer, parameter, self._flat.target(parameter), tensor.numel())
                for parameter, tensor in stepped_pairs(optimizer)
                if parameter.dtype is not torch.float32
            }

            def act(parameters: Sequence[Tensor], inner=inner, counted=counted, targets=targets) -> None:
                with narrowed(inner, parameters) as groups, contiguous(parameters):
                    inner.step()
                for group in groups:
                    if "step" in group:  # TransformerEngine counts steps in the groups, which are copies here
                        counted["step"] = group["step"]
                for tensor in parameters:
                    if tensor in targets:
                        targets[tensor].copy_(tensor)

            state.step(inner, act)
            for group in inner.param_groups:
                group.update(counted)
            if isinstance(optimizer, DistributedOptimizer):
                for module in self.modules:
                    if module in optimizer.model_chunks:
                        module.start_param_sync()

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Within it, float32 copies on the host are placeholders on the device, which can have gradients."""
        copies = [stepped for stepped in self.stepped_tensors() if stepped.is_copy] if self._streamed else []
        places = [copy.tensor.data for copy in copies]
        for copy in copies:
            number = torch.empty((), dtype=copy.tensor.dtype, device=copy.parameter.device)
            copy.tensor.data = number.expand(copy.tensor.shape)
        try:
            yield
        finally:
            for copy, place in zip(copies, places, strict=True):
                copy.tensor.data = place


BUCKET_ELEMENTS: int | None = None
"""Gradients per bucket; None is Megatron-Core's default: the larger of 40 million and 1 million per data rank."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def reduction_config(*, divided: bool, replicas: int) -> DistributedDataParallelConfig:
    """Gradients are accumulated and reduced in float32, overlapped with the backward pass if there are replicas.

    The all-gather of weights does not overlap with the next forward pass, which would keep Megatron-Core's copy of all
    weights in memory during the pass (see docs/decisions/megatron_kernels.md).
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=divided,
        overlap_grad_reduce=replicas > 1,
        bucket_size=BUCKET_ELEMENTS,
    )


def _one_or_all(functions: list[FunctionT]) -> FunctionT | list[FunctionT]:
    """The functions as the schedules expect them: a function for one chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions


def _finalize(modules: list[nn.Module], tokens: Tensor | None = None, **options: object) -> None:
    """Sums gradients over the ranks that share parameters; no division, because losses are normalized already."""
    finalize_model_grads(modules, None, **options)  # pyright: ignore[reportArgumentType]
