"""Devices and the links between them, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a device's peak rates that programs reach: the three constants of a device that are fitted."""

    matrix: float
    """Fraction of `Device.matrix_flops` in large matrix products."""

    bandwidth: float
    """Fraction of the memory bandwidth, and of the links' rates."""

    sync_seconds: float
    """Seconds per synchronization: a collective's latency, and the launch of a decoding step."""


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
    """Memory that the driver, the CUDA context and NCCL take from every process."""

    efficiency: Efficiency


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

    def link_within(self, num_devices: int) -> float:
        """The slowest link among this number of consecutive devices."""
        return self.node_link if num_devices <= self.devices_per_node else self.network_link
