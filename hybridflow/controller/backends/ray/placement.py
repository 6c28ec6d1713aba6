"""Pools as placement groups. On CPUs a device is a unit of a custom resource.

A bundle holds one block of ranks (`ResourcePool.block`) where nodes have room for it: Ray then cannot divide it between
nodes. Above 16 bundles Ray places them in no order (its sort is unstable), so ranks are numbered by the node of each
bundle once that is known.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from hybridflow.controller.backends.interface import RoleMeshes
from hybridflow.controller.backends.ray.cluster import DEVICE, is_joined
from hybridflow.controller.backends.ray.host import Host, started_host
from hybridflow.controller.backends.ray.order import Slot, divided_groups, slots_by_rank
from hybridflow.controller.backends.ray.pulse import Pulse
from hybridflow.controller.resource_pool import ResourcePool, Supply, too_few_devices

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_QUIET_SECONDS = 5.0
"""Seconds until a waiting pool logs it, or takes devices one by one if the free ones form no whole blocks."""


@dataclass
class Reservation:
    """The devices of a pool: a placement group, and what each rank gets of it."""

    group: PlacementGroup
    slots: Sequence[Slot]


@dataclass
class PlacedPool:
    """A reservation and the actors on it."""

    reservation: Reservation
    hosts: list[Host]
    address: ray.ObjectRef | None
    """Where its ranks meet, once the first one has opened it; None for one rank."""


def placed_pool(
    pool: ResourcePool, others: Iterable[ResourcePool], pulse: Pulse, *, threads: int, start_timeout_seconds: float
) -> PlacedPool:
    """The pool's devices, reserved beside those of the other pools, and an actor on each, starting."""
    reservation = reserved(pool, others, timeout_seconds=start_timeout_seconds)
    hosts = [
        started_host(
            pool,
            reservation.group,
            rank=rank,
            bundle=slot.bundle,
            threads=threads,
            timeout_seconds=start_timeout_seconds,
            heart=pulse.new_key(),
        )
        for rank, slot in enumerate(reservation.slots)
    ]
    return PlacedPool(reservation, hosts, hosts[0].actor.serve.remote() if pool.devices > 1 else None)


def reserved(pool: ResourcePool, others: Iterable[ResourcePool], *, timeout_seconds: float) -> Reservation:
    """Reserves the pool's devices; waits up to `timeout_seconds` for a cluster that may still provide them.

    A pending placement group is what Ray's autoscaler acts on. Raises `ResourceError`: immediately if Ray was started
    here and the machine has too few devices, otherwise after the timeout.
    """
    others, resource = list(others), _resource(pool)
    supply = _supply(pool, resource, others)
    if pool.devices + supply.own > supply.total and not is_joined():
        raise too_few_devices(pool, supply)
    size, is_said, started = pool.block, False, time.monotonic()
    group = _requested(pool, resource, size)
    while not group.wait(_LOOK_SECONDS):
        waited, supply = time.monotonic() - started, _supply(pool, resource, others)
        if waited > timeout_seconds:
            remove_placement_group(group)
            raise too_few_devices(pool, supply, waited_seconds=waited)
        if waited > _QUIET_SECONDS and size > 1 and supply.free >= pool.devices:
            remove_placement_group(group)
            size, group = 1, _requested(pool, resource, 1)
        elif waited > _QUIET_SECONDS and not is_said:
            is_said = True
            until = datetime.now() + timedelta(seconds=timeout_seconds - waited)
            logger.warning(
                "pool=%s waits for %d devices (%s), until %s (trainer.start_timeout_seconds=%g): %s",
                pool.name, pool.devices, pool.device, f"{until:%H:%M:%S}", timeout_seconds, supply,
            )  # fmt: skip
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return Reservation(group, slots_by_rank(nodes, devices_per_bundle=size, block=pool.block))


def warn_of_divided_groups(role: str, meshes: RoleMeshes, slots: Sequence[Slot]) -> None:
    """Warns of the tensor-parallel groups of a role that span nodes: they exchange activations at every layer."""
    nodes = [slot.node for slot in slots]
    for what, mesh in (("training", meshes.training), ("generation", meshes.generation or meshes.training)):
        divided = divided_groups(mesh, nodes)
        if divided and (what == "training" or mesh is not meshes.training):
            logger.warning(
                "role=%s: %d of %d tensor-parallel groups of %s span several nodes, for example ranks %s. Every layer "
                "then waits for the network; use a tensor size that divides the devices of each node.",
                role, len(divided), mesh.size // mesh.axis_size("tensor"), what, divided[0],
            )  # fmt: skip


def _requested(pool: ResourcePool, resource: str, size: int) -> PlacementGroup:
    return placement_group([{resource: size}] * (pool.devices // size), strategy="PACK")


def _resource(pool: ResourcePool) -> str:
    return "GPU" if pool.device == "cuda" else DEVICE if DEVICE in ray.cluster_resources() else "CPU"


def _supply(pool: ResourcePool, resource: str, others: Iterable[ResourcePool]) -> Supply:
    total, free = (int(held.get(resource, 0)) for held in (ray.cluster_resources(), ray.available_resources()))
    return Supply(total, free, sum(other.devices for other in others if other.device == pool.device))
