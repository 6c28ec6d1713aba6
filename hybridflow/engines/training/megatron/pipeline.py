"""Runs microbatches through pipeline stages: the 1F1B schedule, or forward passes alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from safetensors.torch import load, save
from torch import Tensor

from hybridflow.engines.training.megatron.attention import Rotary
from hybridflow.engines.training.megatron.model import Chunk
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.observability.metrics import Metrics, SentMetrics
from hybridflow.parallel.collectives import broadcast_bytes

ReportT = TypeVar("ReportT")

LossFunc = Callable[[MicroBatch, dict[str, Tensor]], tuple[Tensor, ReportT]]
"""Called on the last stage: maps a microbatch and its outputs to a loss and a report."""


def run_pipeline(
    modules: Sequence[Chunk | DistributedDataParallel],
    micros: Sequence[MicroBatch],
    loss_func: LossFunc[ReportT],
    *,
    outputs: tuple[str, ...],
    temperature: float,
    rotary: Rotary,
    with_gradient: bool,
) -> list[ReportT]:
    """The report of `loss_func` for each microbatch, in order, on ranks of the last stage; an empty list on others.

    `loss_func` receives the named `outputs`. With `with_gradient`, the gradients of the summed losses are left in the
    parameters' `main_grad`, summed over data-parallel ranks. The layout's process groups must be active. With virtual
    stages, the number of microbatches must be a multiple of the number of pipeline ranks.
    """

    def step(remaining: Iterator[MicroBatch], module: Chunk | DistributedDataParallel):
        micro = next(remaining)
        chunk = unwrapped(module)
        hidden = module(micro, rotary(micro.packing, chunk.config.params_dtype))

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, ReportT]:
            loss, report = loss_func(micro, chunk.outputs(hidden, micro, outputs, temperature))
            return loss, torch.zeros((), dtype=torch.int32, device=loss.device), report

        return hidden, loss_of

    with torch.set_grad_enabled(with_gradient):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in modules],
            model=list(modules),
            num_microbatches=len(micros),
            seq_length=len(micros[0].input_ids),
            micro_batch_size=1,
            forward_only=not with_gradient,
        )


def unwrapped(module: Chunk | DistributedDataParallel) -> Chunk:
    """The chunk in its gradient wrapper, if it has one."""
    chunk = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(chunk, Chunk), f"{type(chunk).__name__} in a pipeline"
    return chunk


def outputs_of_last_stage(outputs: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The last stage's outputs for each microbatch, on all stages."""
    own = {f"{number}/{name}": flat for number, named in enumerate(outputs) for name, flat in named.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for key, flat in load(_from_last_stage(save(own))).items():
        number, _, name = key.partition("/")
        found.setdefault(int(number), {})[name] = flat
    return [found[number] for number in sorted(found)]


def metrics_of_last_stage(metrics: Metrics) -> Metrics:
    """The last stage's metrics, on all stages."""
    own = SentMetrics.of(metrics)
    schema, _, numbers = _from_last_stage(own.schema.encode() + b"\n" + own.numbers).partition(b"\n")
    return SentMetrics(schema.decode(), numbers).received()


def _from_last_stage(message: bytes) -> bytes:
    """The last stage's message, on all stages; it is bytes, because data from the network must not be executed."""
    group = parallel_state.get_pipeline_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup), f"no pipeline group: {group}"
    return message if group.size() == 1 else broadcast_bytes(message, group, source=group.size() - 1)
