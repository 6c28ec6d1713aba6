"""How gradients are summed over data-parallel ranks: in buckets, while the backward pass goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

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
