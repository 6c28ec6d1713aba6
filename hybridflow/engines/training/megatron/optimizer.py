"""Megatron-Core's AdamW over a rank's chunks, with its state whole on each data-parallel rank or divided over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn
from torch.optim import Optimizer as Adam

from hybridflow.config.training import Optimizer
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.megatron.model import Chunk
from hybridflow.engines.training.megatron.optimizer_state import FlatWeights, moved_tensors, set_steps
from hybridflow.engines.training.megatron.parameters import held_parameters
from hybridflow.engines.training.optimizer import contiguous
from hybridflow.engines.training.state_files import (
    FIRST_MOMENT,
    MASTER,
    SECOND_MOMENT,
    StateShard,
    load_state,
    save_state,
)
from hybridflow.engines.training.streamed_state import StreamedState, narrowed
from hybridflow.models.names.parts import views
from hybridflow.parallel.groups import Ranks


class ChunkOptimizer:
    """Gradients in float32, their norm, and AdamW's step; weight decay is on matrices alone.

    `divided` is Megatron-Core's distributed optimizer (ZeRO-1, arXiv:1910.02054): each data-parallel rank reduces,
    moves and keeps the state of a range of all weights, and gathers the others' ranges after the step. `replicas` is
    the number of data-parallel ranks.

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
        """Of each optimizer of the chain, while its state waits on the host."""

    def zero_grad(self) -> None:
        """Before a pass with gradients. Takes the memory of the gradients again where it was given back."""
        for buffer in self._gradient_buffers():
            buffer.reload_from_cpu(move_params=False, move_grads=True)
        for module in self.modules:
            module.zero_grad_buffer()
        self._chain.zero_grad()

    def reducing(self) -> AbstractContextManager[None]:
        """Within it, gradients are summed over data-parallel ranks while the backward pass goes on."""
        return reducing(self._model_config, self.modules)

    def free_gradients(self) -> None:
        """Gives the memory of the gradients back until the next pass."""
        self._chain.zero_grad()
        for buffer in self._gradient_buffers():
            buffer.offload_to_cpu(move_params=False, move_grads=True)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """The norm of all ranks' gradients together, before clipping."""
        with self._stand_ins():
            self._chain.prepare_grads()
        return float(self._chain.get_grad_norm())

    @torch.no_grad()
    def step(self, norm: float, *, learning_rate: float) -> None:
        """One step along the gradients, clipped to the largest norm allowed; `norm` is theirs.

        The numbers do not depend on where the state waits.
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

    def rest(self, shelf: HostShelf) -> None:
        """Takes moments and float32 copies to the host, where `step` brings them from a bucket at a time.

        Gradients are given up, and their memory is given back.
        """
        self.free_gradients()
        if not self._streamed:
            copies = [moved.tensor for moved in moved_tensors(self._chain) if moved.is_copy]
            self._streamed = [StreamedState(copies, shelf) for _ in self._chain.chained_optimizers]
        self._settle()

    def bring_back(self) -> None:
        """Takes them to the device for good."""
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=False):
            state.bring_back(optimizer.optimizer)
        self._streamed = []

    def state_shards(self) -> Iterator[StateShard]:
        """The state that this rank keeps, as writable views: moments once there are any, and float32 copies."""
        for moved in moved_tensors(self._chain):
            part = self._part_of[moved.parameter]
            kept = {kind: moved.state[kind] for kind in (FIRST_MOMENT, SECOND_MOMENT) if kind in moved.state}
            for kind, values in (kept | ({MASTER: moved.tensor} if moved.is_copy else {})).items():
                for shard in moved.shards(values, part):
                    yield kind, shard

    def save(self, directory: Path, steps: int, ranks: Ranks) -> None:
        """Writes the state and the steps taken, with all ranks."""
        save_state(directory, self.state_shards(), steps, ranks)

    def load(self, directory: Path, ranks: Ranks) -> int:
        """Fills the state with what `save` of any engine in any layout wrote; returns the steps. Weights come first."""
        set_steps(self._chain, 0)
        uncopied = [
            shard
            for parameter, part in self._part_of.items()
            if parameter.dtype is torch.float32
            for shard in views(parameter.data, [part])
        ]
        steps = load_state(directory, self.state_shards(), ranks, own_copies=uncopied)
        set_steps(self._chain, steps)
        self._settle()
        return steps

    def _settle(self) -> None:
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=False):
            state.settle(optimizer.optimizer)

    def _step_in_buckets(self) -> None:
        """What `step_with_ready_grads` of the chain does, while a bucket of the state is on the device."""
        copies = {moved.tensor: moved for moved in moved_tensors(self._chain) if moved.is_copy}
        for optimizer, state in zip(self._chain.chained_optimizers, self._streamed, strict=True):
            inner = optimizer.optimizer
            counted: dict[str, int] = {}

            def act(parameters: Sequence[Tensor], inner: Adam = inner, counted: dict[str, int] = counted) -> None:
                with narrowed(inner, parameters) as groups, contiguous(parameters):
                    inner.step()
                for group in groups:
                    if "step" in group:  # Transformer Engine counts steps in the groups, which are copies here
                        counted["step"] = group["step"]
                for moved in (copies[tensor] for tensor in parameters if tensor in copies):
                    moved.range_of(self._flat.target(moved.parameter)).copy_(moved.tensor)

            state.step(inner, act)
            for group in inner.param_groups:
                group.update(counted)
            if isinstance(optimizer, DistributedOptimizer):
                for module in self.modules:
                    if module in optimizer.model_chunks:
                        module.start_param_sync()

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Meanwhile float32 copies that wait on the host seem to be on the device, so that they can have gradients."""
        waiting = [moved for moved in moved_tensors(self._chain) if moved.is_copy] if self._streamed else []
        places = [moved.tensor.data for moved in waiting]
        for moved in waiting:
            number = torch.empty((), dtype=moved.tensor.dtype, device=moved.parameter.device)
            moved.tensor.data = number.expand(moved.tensor.shape)
        try:
            yield
        finally:
            for moved, place in zip(waiting, places, strict=True):
                moved.tensor.data = place

    def _gradient_buffers(self) -> Iterator[_ParamAndGradBuffer]:
        for module in self.modules:
            yield from (*vars(module)["buffers"], *module.expert_parallel_buffers)


BUCKET_ELEMENTS: int | None = None
"""Gradients per bucket; None is Megatron-Core's choice: 40 million, or 1 million per data-parallel rank if more."""

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def reduction_config(*, divided: bool, replicas: int) -> DistributedDataParallelConfig:
    """Gradients are added up and summed in float32; there is nothing to overlap on a single data-parallel rank.

    Weights are not gathered during the next forward pass: that would keep Megatron-Core's copy of all weights through
    the pass (see docs/decisions/megatron_kernels.md).
    """
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=divided,
        overlap_grad_reduce=replicas > 1,
        bucket_size=BUCKET_ELEMENTS,
    )


@contextmanager
def reducing(config: TransformerConfig, modules: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Within it, the pipeline's schedules sum a bucket once the last micro-batch has added to all of its gradients.

    Micro-batches before the last add to the gradients without exchanging them. Later stages of a pipeline, which end
    their backward passes first, sum theirs at the end, as in Megatron-Core's training loop. Passes without gradients
    must not run within it: a schedule that only runs forward never leaves `no_sync`.
    """
    if not any(module.ddp_config.overlap_grad_reduce for module in modules):
        yield
        return
    no_sync: list[Callable[[], AbstractContextManager[None]]] = [module.no_sync for module in modules]
    config.no_sync_func = _one_or_all(no_sync)  # pyright: ignore[reportAttributeAccessIssue]
    config.grad_sync_func = _one_or_all([module.start_grad_sync for module in modules])  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        config.no_sync_func = config.grad_sync_func = None


def _one_or_all(functions: list[FunctionT]) -> FunctionT | list[FunctionT]:
    """What the schedules expect: a function for one chunk, a list for several."""
    return functions[0] if len(functions) == 1 else functions


def _finalize(modules: list[nn.Module], tokens: Tensor | None = None, **options: object) -> None:
    """Sums gradients over the ranks that share their parameters; they are divided by nothing, as losses are already."""
    finalize_model_grads(modules, None, **options)  # pyright: ignore[reportArgumentType]
