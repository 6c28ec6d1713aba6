"""Pools as placement groups: one bundle per device. On CPUs a device is a unit of a custom resource."""

from collections.abc import Iterable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from hybridflow.controller.backends.ray.cluster import DEVICE
from hybridflow.controller.backends.ray.host import Host, started_host
from hybridflow.controller.resource_pool import ResourcePool, too_few_devices

PLACEMENT_TIMEOUT_SECONDS = 60.0


@dataclass
class PlacedPool:
    """A placement group and its actors."""

    placement: PlacementGroup
    hosts: list[Host]
    address: ray.ObjectRef | None
    """Where its ranks meet, once the first one has opened it; None for one rank."""


def placed_pool(pool: ResourcePool, others: Iterable[ResourcePool], *, threads: int) -> PlacedPool:
    """The pool's devices, reserved beside those of the other pools, and an actor on each, starting."""
    resource = "GPU" if pool.device == "cuda" else DEVICE if DEVICE in ray.cluster_resources() else "CPU"
    taken = sum(other.devices for other in others if other.device == pool.device)
    total = int(ray.cluster_resources().get(resource, 0))
    if pool.devices > total - taken:
        raise too_few_devices(pool, total=total, taken=taken)
    group = placement_group([{resource: 1}] * pool.devices, strategy="PACK")
    if not group.wait(PLACEMENT_TIMEOUT_SECONDS):
        remove_placement_group(group)
        raise too_few_devices(pool, total=total, taken=taken)
    hosts = [started_host(pool, group, rank=rank, bundle=rank, threads=threads) for rank in range(pool.devices)]
    return PlacedPool(group, hosts, hosts[0].actor.serve.remote() if pool.devices > 1 else None)
