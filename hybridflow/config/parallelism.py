"""How a model is spread over the devices of its pool."""

from dataclasses import dataclass
from typing import Annotated

from hybridflow.config.ranges import AT_LEAST_1
from hybridflow.config.section import Section


@dataclass
class Parallelism(Section):
    """A trained (or frozen) model's layout; what is left of the pool's devices divides the data."""

    tensor: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide each matrix (fsdp, megatron)."""

    pipeline: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide the layers, one behind the other (megatron)."""

    virtual_pipeline: Annotated[int, AT_LEAST_1] = 1
    """Groups of layers a pipeline stage holds; more of them wait less for one another (megatron)."""

    expert: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide the experts of a mixture-of-experts model, among those that divide the data (megatron)."""

    sequence: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide each sequence, by Ulysses' exchange of heads (fsdp; arXiv:2309.14509)."""

    sequence_parallel: bool = False
    """Tensor-parallel devices also divide the tokens between matrices: less memory, same result (megatron)."""

    replicas: Annotated[int, AT_LEAST_1] = 1
    """Whole copies of the sharded model: shards are exchanged inside a copy alone, as in HSDP (fsdp)."""

    distributed_optimizer: bool = True
    """Data-parallel devices divide the optimizer's state (megatron; ZeRO-1)."""


@dataclass
class RolloutParallelism(Section):
    """The layout of the model that generates; what is left of the devices are replicas that divide the prompts."""

    tensor: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide each matrix (vllm)."""

    pipeline: Annotated[int, AT_LEAST_1] = 1
    """Devices that divide the layers (vllm, on GPUs)."""
