"""Rates at which the devices of a cluster compute, read and exchange."""

from dataclasses import dataclass

from hybridflow.mapping.devices import Cluster


@dataclass(frozen=True)
class Group:
    """Devices that exchange data: every `stride`-th of consecutive ranks."""

    size: int
    stride: int = 1

    def per_node(self, devices_per_node: int) -> int:
        """Members on one node."""
        if self.size * self.stride <= devices_per_node:
            return self.size
        return max(1, min(self.size, devices_per_node // self.stride))


@dataclass(frozen=True)
class Rates:
    """The rates of a cluster that programs reach, for weights of a number of bytes.

    Collectives are bound by bandwidth, with one synchronization each; a collective of one device takes no time. Within
    a node, every device receives over its own link. Between nodes, members on one node share their network links: each
    byte enters a node once.
    """

    cluster: Cluster
    value_bytes: int

    @property
    def flops(self) -> float:
        """FLOP/s of matrix products; one-byte values double the rate of bfloat16."""
        device = self.cluster.device
        peak = {4: device.float32_flops, 2: device.matrix_flops, 1: 2 * device.matrix_flops}[self.value_bytes]
        return peak * device.efficiency.matrix

    @property
    def memory(self) -> float:
        """Bytes per second from a device's memory."""
        return self.cluster.device.memory_bandwidth * self._reached

    @property
    def host(self) -> float:
        """Bytes per second between a device and its node's memory."""
        return self.cluster.host_link * self._reached

    @property
    def sync(self) -> float:
        """Seconds per synchronization."""
        return self.cluster.device.efficiency.sync_seconds

    def latency(self, num_devices: int) -> float:
        """Seconds of a collective in addition to its bytes."""
        return self.sync if num_devices > 1 else 0.0

    def link(self, num_devices: int) -> float:
        """Bytes per second to one device, over the slowest link among this number of consecutive devices."""
        return self.cluster.link_within(num_devices) * self._reached

    def all_gather(self, total_bytes: float, group: Group) -> float:
        """Seconds until each device has all bytes, of which it had one share; also of a reduce-scatter."""
        if group.size == 1:
            return 0.0
        inside = group.per_node(self.cluster.devices_per_node)
        node, network = self.cluster.node_link * self._reached, self.cluster.network_link * self._reached
        nodes = group.size / inside
        within = total_bytes * (group.size - 1) / group.size / node if inside > 1 else 0.0
        return max(within, total_bytes * (nodes - 1) / nodes / (inside * network)) + self.latency(group.size)

    def all_reduce(self, total_bytes: float, group: Group) -> float:
        """Seconds of a reduce-scatter and an all-gather, as one collective."""
        return 2 * self.all_gather(total_bytes, group) - self.latency(group.size)

    def all_to_all(self, sent_bytes: float, group: Group) -> float:
        """Seconds until each device has sent `sent_bytes`, in equal parts to all devices."""
        if group.size == 1:
            return 0.0
        inside = group.per_node(self.cluster.devices_per_node)
        node, network = self.cluster.node_link * self._reached, self.cluster.network_link * self._reached
        within = sent_bytes * (inside - 1) / group.size / node
        return max(within, sent_bytes * (group.size - inside) / group.size / network) + self.latency(group.size)

    @property
    def _reached(self) -> float:
        return self.cluster.device.efficiency.bandwidth
