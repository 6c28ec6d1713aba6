"""Devices and the links between them, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_OFFLOAD_FRACTION = 0.9
"""Ray ends processes when 95% of a node's memory is used (RAY_memory_usage_threshold); the processes themselves and the
batches between them need the rest."""


@dataclass(frozen=True)
class Efficiency:
    """The constants of a device that are fitted: two fractions of its peak rates, and the seconds of a
    synchronization."""

    matrix: float
    """Fraction of `Device.matrix_flops` in large matrix products."""

    bandwidth: float
    """Fraction of the memory bandwidth."""

    sync_seconds: float
    """Seconds of a collective in addition to its bytes and, for engines without `launch_seconds`, of launching one
    layer."""


@dataclass(frozen=True)
class Device:
    """One kind of device."""

    name: str
    memory_bytes: int
    matrix_flops: float
    """Peak dense FLOP/s in bfloat16."""

    float32_flops: float
    """Peak FLOP/s of matrix products in float32."""

    memory_bandwidth: float
    """Bytes per second."""

    reserved_bytes: int
    """Memory that no tensor can use: the driver, the CUDA context, NCCL, and what fragmentation leaves over."""

    efficiency: Efficiency
    cores: float = 0.0
    """Processes of a node that run at these rates at once, on a CPU; more of them share the cores. 0 if each device has
    a processor of its own."""

    launch_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By engine: seconds of the host per layer and pass, or per layer and decoding step. Engines without a number take
    `Efficiency.sync_seconds`."""

    request_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By rollout engine: seconds of the host per response and decoding step, for scheduling and sampling; 0 for engines
    without a number."""

    slowdown: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By training engine: the factor by which its layers take longer than the fitted rates predict; 1 for engines
    without a number."""

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are processes on a CPU."""
        return self.cores > 0


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind on nodes of equal size. Link rates are bytes per second per device, in one direction."""

    device: Device
    num_devices: int
    devices_per_node: int
    node_link: float
    """Between devices of one node."""

    network_link: float
    """Between devices of different nodes."""

    host_link: float
    """Between a device and the memory of its node."""

    host_bytes: float
    """Memory of a node per device of the node."""

    storage_link: float = 2e9
    """Between a node and the storage of models and checkpoints: bytes per second of the whole node."""

    @property
    def offload_bytes(self) -> float:
        """Host memory per device for what is offloaded."""
        return _OFFLOAD_FRACTION * self.host_bytes

    @property
    def crowding(self) -> float:
        """How many times longer everything takes because processes share cores."""
        cores = self.device.cores
        return max(1.0, min(self.num_devices, self.devices_per_node) / cores) if cores else 1.0
