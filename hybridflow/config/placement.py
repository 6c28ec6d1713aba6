"""Settings of pools of devices, and of how models are parallelized over them."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, ClassVar

from hybridflow.config.ranges import AT_LEAST_1
from hybridflow.config.section import Section


class PlacementKind(Enum):
    """Who decides which roles share devices."""

    given = "given"
    colocated = "colocated"
    split = "split"
    standalone = "standalone"
    auto = "auto"


class ParallelismKind(Enum):
    """Who decides how a model is parallelized over the devices of its pool."""

    given = "given"
    auto = "auto"


class Device(Enum):
    """Type of the devices."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class Pool(Section):
    """A set of devices. Roles in one pool share its devices; pools do not overlap."""

    devices: Annotated[int, AT_LEAST_1] = 1
    """Number of devices in the pool."""

    device: Device = Device.auto
    """auto: the run's devices (trainer.device), which all such pools divide. cpu: processes without a GPU, which
    trainer.devices does not count, for reward functions and models other than the rollout's. cuda: as auto, but an
    error if the run is on CPUs."""

    resource: str | None = None
    """A Ray resource that the nodes of the pool must have: one that you gave to nodes (`ray start
    --resources='{"big_memory": 8}'`, one unit per device), or a kind of GPU (`accelerator_type:A100`)."""


@dataclass
class Placement(Section):
    """Pools and role placement. By default, all roles share one pool with all devices; slow reward functions may have
    their own (see `roles`)."""

    word: ClassVar[str | None] = "kind"
    """See `Section.word`."""

    kind: PlacementKind = PlacementKind.given
    """given: `pools` and `roles` define the placement. Otherwise hybridflow chooses the one with the shortest predicted
    step: one pool (colocated), two pools (split), one pool per model, except that the rollout may share the actor's
    (standalone), or any placement, with all parallel sizes (auto). `placement=split` sets it."""

    pools: dict[str, Pool] = field(default_factory=dict)
    """Pools by name."""

    roles: dict[str, str] = field(default_factory=dict)
    """The pool of each role; roles that are not listed use the first pool, and the rollout uses the actor's. Without
    `pools`, the pools are `main` (all devices) and `cpus` (as many CPU processes). On Ray, reward functions that may be
    slow run in `cpus` by default, so that scoring overlaps with other calls; `placement.roles.reward=main` runs them in
    the actor's pool."""


@dataclass
class Parallelism(Section):
    """Parallel sizes of a trained or frozen model; the remaining devices of its pool are data-parallel."""

    word: ClassVar[str | None] = "kind"
    """See `Section.word`."""

    kind: ParallelismKind = ParallelismKind.given
    """given: the sizes below. auto: hybridflow chooses those with the shortest predicted step, and keeps sizes that you
    set. `actor.parallelism=auto` sets it for the actor."""

    tensor: Annotated[int, AT_LEAST_1] = 1
    """Tensor-parallel size: devices that share each matrix (fsdp, megatron)."""

    pipeline: Annotated[int, AT_LEAST_1] = 1
    """Number of pipeline stages (megatron)."""

    virtual_pipeline: Annotated[int, AT_LEAST_1] = 1
    """Groups of layers per pipeline stage (interleaved schedule); more of them reduce idle time (megatron)."""

    expert: Annotated[int, AT_LEAST_1] = 1
    """Expert-parallel size of a mixture-of-experts model, among the data-parallel devices (megatron)."""

    sequence: Annotated[int, AT_LEAST_1] = 1
    """Sequence-parallel size: devices that share each sequence (DeepSpeed-Ulysses, arXiv:2309.14509; fsdp)."""

    sequence_parallel: bool = False
    """Tensor-parallel devices also shard activations between matrices: less memory, same result (megatron)."""

    replicas: Annotated[int, AT_LEAST_1] = 1
    """Number of copies of the sharded model, as in HSDP: parameters are gathered within each copy (fsdp)."""

    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel devices (megatron; ZeRO-1)."""


@dataclass
class RolloutParallelism(Section):
    """Parallel sizes of the rollout's model; the remaining devices form replicas that divide the prompts."""

    word: ClassVar[str | None] = "kind"
    """See `Section.word`."""

    kind: ParallelismKind = ParallelismKind.given
    """given: the sizes below. auto: hybridflow chooses those with the shortest predicted step, and keeps sizes that you
    set. `rollout.parallelism=auto` sets it."""

    tensor: Annotated[int, AT_LEAST_1] = 1
    """Tensor-parallel size: devices that share each matrix (vllm)."""

    pipeline: Annotated[int, AT_LEAST_1] = 1
    """Number of pipeline stages (vllm, on GPUs)."""
