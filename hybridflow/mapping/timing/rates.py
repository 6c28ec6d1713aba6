"""Rates at which the devices of a cluster compute, read and exchange."""

from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.elementwise import where

Seconds = TypeVar("Seconds", float, np.ndarray)

NODE_REACHED, NETWORK_REACHED = 0.8, 0.9
"""Fractions of the links' rates that collectives are assumed to reach within a node, and between nodes.

Between nodes, with four network cards of 25 GB/s per node, NCCL's all-reduce has a bus bandwidth of 96 GB/s of 100 for
large messages, and 85 on average over sizes (https://github.com/NVIDIA/nccl-tests/issues/119); 0.9 lies between these.
Within a node, 0.8 is assumed.
"""

_NODE_HOP_SECONDS, _NETWORK_HOP_SECONDS = 1.9e-6, 4e-6
"""Latency of a step of a ring over NVLink and over the network, in NCCL's own tables (LL128, src/graph/tuning.cc).
Within one node, `Efficiency.sync_seconds` includes all steps."""

_EAGER_LAUNCH_SECONDS = 22.5e-3 / 28
"""Without CUDA graphs, the thinker of Qwen2.5-Omni-7B (28 layers) takes 22 to 23 ms per token on A800 in vLLM-Omni, and
13 ms with them (https://github.com/vllm-project/vllm-omni/issues/7960). All of it is taken to be launches; the host's
processor matters, so calibrate."""


@dataclass(frozen=True)
class Group:
    """Devices that exchange data: every `stride`-th of consecutive ranks."""

    size: int
    stride: int = 1

    def per_node(self, devices_per_node: int) -> float:
        """Members on one node."""
        shared = np.maximum(1, np.minimum(self.size, devices_per_node // self.stride))
        return where(self.size * self.stride <= devices_per_node, self.size, shared)


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
        return self.cluster.device.memory_bandwidth * self.cluster.device.efficiency.bandwidth

    @property
    def host(self) -> float:
        """Bytes per second between a device and its node's memory."""
        return self.cluster.host_link * NODE_REACHED

    @property
    def sync(self) -> float:
        """Seconds per synchronization."""
        return self.cluster.device.efficiency.sync_seconds

    def launch(self, engine: str) -> float:
        """Seconds of the host per layer that an engine runs."""
        return self.cluster.device.launch_seconds.get(engine, self.sync)

    def request(self, engine: str) -> float:
        """Seconds of the host per response and decoding step of a rollout engine."""
        return self.cluster.device.request_seconds.get(engine, 0.0)

    def slowdown(self, engine: str) -> float:
        """The factor by which the layers of a training engine take longer than these rates predict."""
        return self.cluster.device.slowdown.get(engine, 1.0)

    def exposed(self, seconds: Seconds, meanwhile: Seconds) -> Seconds:
        """Seconds that remain of what runs while a device does something else; a CPU does one after the other."""
        return seconds if self.cluster.device.is_cpu else cast(Seconds, np.maximum(0.0, seconds - meanwhile))

    @property
    def eager_launch(self) -> float:
        """Seconds in which a host launches the kernels of one layer without CUDA graphs; a CPU computes them itself."""
        return 0.0 if self.cluster.device.is_cpu else _EAGER_LAUNCH_SECONDS

    def latency(self, num_devices: int) -> float:
        """Seconds of a collective in addition to its bytes."""
        return where(num_devices > 1, self.sync, 0.0)

    def link(self, num_devices: int) -> float:
        """Bytes per second to one device, over the slowest link among this number of consecutive devices."""
        return where(num_devices <= self.cluster.devices_per_node, self._node, self._network)

    def all_gather(self, total_bytes: float, group: Group) -> float:
        """Seconds until each device has all bytes, of which it had one share; also of a reduce-scatter."""
        inside = group.per_node(self.cluster.devices_per_node)
        node, network = self._node, self._network
        nodes = group.size / inside
        within = where(inside > 1, total_bytes * (group.size - 1) / group.size / node, 0.0)
        return np.maximum(within, total_bytes * (nodes - 1) / nodes / (inside * network)) + self.latency(group.size)

    def all_reduce(self, total_bytes: float, group: Group) -> float:
        """Seconds of a reduce-scatter and an all-gather, as one collective."""
        return 2 * self.all_gather(total_bytes, group) - self.latency(group.size)

    def hops(self, group: Group) -> float:
        """Latency of one pass of a ring through all nodes of a group but the first; it adds up if each layer has a
        collective."""
        inside = group.per_node(self.cluster.devices_per_node)
        per_node = _NETWORK_HOP_SECONDS + (inside - 1) * _NODE_HOP_SECONDS
        return (group.size / inside - 1) * where(self.cluster.device.is_cpu, 0.0, per_node)

    def all_to_all(self, sent_bytes: float, group: Group) -> float:
        """Seconds until each device has sent `sent_bytes`, in equal parts to all devices."""
        inside = group.per_node(self.cluster.devices_per_node)
        node, network = self._node, self._network
        within = sent_bytes * (inside - 1) / group.size / node
        return np.maximum(within, sent_bytes * (group.size - inside) / group.size / network) + self.latency(group.size)

    @property
    def _node(self) -> float:
        return self.cluster.node_link * NODE_REACHED

    @property
    def _network(self) -> float:
        return self.cluster.network_link * NETWORK_REACHED
