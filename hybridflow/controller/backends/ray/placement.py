"""Pools as placement groups. On CPUs a device is a unit of a custom resource.

A bundle holds one block of ranks (`ResourcePool.block`) if it fits on a node: Ray never divides a bundle between nodes.
Ray places more than 16 bundles in an arbitrary order (its sort is unstable), so ranks are numbered after placement, by
the node of each bundle.
"""

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hybridflow.controller.backends.interface import GIVEN_POOLS
from hybridflow.controller.backends.ray.cluster import is_joined, resource_of
from hybridflow.controller.backends.ray.host import Host, Place, started_host
from hybridflow.controller.backends.ray.pulse import Pulse
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.errors import NoRoom, ResourceError
from hybridflow.parallel import ParallelMesh

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_KIND_OF_GPU, _SOME = "accelerator_type:", 0.001
"""A node has one unit of the resource that names the kind of its GPUs, however many it has; Ray's own tasks request the
thousandth part of it."""

_PLACED = "CREATED"
"""Ray's state of a placement group whose bundles all have a node."""

_QUIET_SECONDS = 5.0
"""Seconds until a waiting pool logs that it waits, or requests single devices if too few blocks are free."""


class Slot(NamedTuple):
    """A device of a placement group: the index of its bundle, and the node of the bundle."""

    bundle: int
    node: str


@dataclass(frozen=True)
class Supply:
    """Devices of one kind in a cluster: all, those that are free, and those held by other pools of this run."""

    total: int
    free: int
    own: int

    def __str__(self) -> str:
        others = max(0, self.total - self.free - self.own)
        held = f"{self.own} held by other pools of this run, {others} by other jobs"
        return f"the cluster has {self.total}: {self.free} free, {held}"


@dataclass
class PlacedPool:
    """The devices of a pool, the slot of each rank, and the actors on them."""

    group: PlacementGroup
    slots: Sequence[Slot]
    hosts: list[Host]
    address: ray.ObjectRef | None
    """Reference to the address of the store through which its ranks connect; None for one rank."""

    places: Sequence[Place]
    """Those of the ranks."""

    start: Callable[[Place], Host]
    """Starts the process of a rank."""

    specs: list[tuple[str, ray.ObjectRef]] = field(default_factory=list)
    """The roles of its processes, with their `WorkerSpec`."""

    is_given: bool = False
    """Whether another process has reserved the devices, and releases them."""

    def nodes(self) -> list[str | None]:
        """The id of the node of each rank; None while its bundle waits for a node."""
        by_bundle = placement_group_table(self.group)["bundles_to_node_id"]
        return [by_bundle.get(slot.bundle) or None for slot in self.slots]

    def restart(self, taken: Callable[[ResourcePool, Place, str | None], Host | None]) -> None:
        """Starts new processes in the places of the hosts, whose earlier ones have been ended, except where `taken`
        returns one that has started before."""
        for host, place, node in zip(self.hosts, self.places, self.nodes(), strict=True):
            found = None if host.is_on_lost_node else taken(host.pool, place, node)
            host.become(found or self.start(place))
        self.address = served(self.hosts)


def placed_pool(
    pool: ResourcePool, others: Iterable[ResourcePool], pulse: Pulse, *, threads: int, start_timeout_seconds: float
) -> PlacedPool:
    """Reserves the pool's devices, unless that has been done for this run, and starts an actor on each device."""
    if (given := _given(pool)) is not None:
        group, slots = given, _slots(pool, given)
    else:
        group, slots = reserved(pool, others, timeout_seconds=start_timeout_seconds)

    def start(place: Place) -> Host:
        return started_host(pool, group, place, bundle=slots[place.rank].bundle, heart=pulse.new_key())

    places = [
        Place(rank, pool.devices, pool.device, threads=threads, timeout_seconds=start_timeout_seconds)
        for rank in range(pool.devices)
    ]
    hosts = [start(place) for place in places]
    return PlacedPool(group, slots, hosts, served(hosts), places, start, is_given=given is not None)


def served(hosts: Sequence[Host]) -> ray.ObjectRef | None:
    """Starts the store through which the ranks of a pool connect; a reference to its address, None for one rank."""
    return hosts[0].actor.serve.remote() if len(hosts) > 1 else None


class Request:
    """A pending request for a pool's devices, in addition to those of other pools; Ray's autoscaler acts on it.

    Requests whole blocks, or single devices once enough devices are free but too few blocks.
    """

    def __init__(self, pool: ResourcePool, others: Iterable[ResourcePool] = ()) -> None:
        self.pool = pool
        self.resource = resource_of(pool.device)
        self._others, self._size = list(others), pool.block
        self._began = time.monotonic()
        self.group = self._requested()

    @property
    def waited_seconds(self) -> float:
        """Seconds since the request was made."""
        return time.monotonic() - self._began

    @property
    def supply(self) -> Supply:
        """The devices of the cluster that the pool could get."""
        return _supply(self.pool, self.resource, self._others)

    def is_granted(self, seconds: float) -> bool:
        """Whether the devices are reserved; waits for them at most so long."""
        if self.group.wait(seconds):
            return True
        if self._size > 1 and self.waited_seconds > _QUIET_SECONDS and self.supply.free >= self.pool.devices:
            self.withdraw()
            self._size = 1
            self.group = self._requested()
        return False

    def withdraw(self) -> None:
        """Ends the request, or releases its devices."""
        remove_placement_group(self.group)

    def _requested(self) -> PlacementGroup:
        bundle = _bundle(self.pool, self.resource, self._size)
        strategy = "SPREAD" if self.pool.has_only_functions else "PACK"
        return placement_group([bundle] * (self.pool.devices // self._size), strategy=strategy)


def reserved(
    pool: ResourcePool, others: Iterable[ResourcePool], *, timeout_seconds: float
) -> tuple[PlacementGroup, list[Slot]]:
    """Reserves the pool's devices; waits up to `timeout_seconds` for a cluster that may still provide them.

    Raises `ResourceError`: immediately if Ray was started here and the machine has too few devices, otherwise after the
    timeout.
    """
    others = list(others)
    supply = _supply(pool, resource_of(pool.device), others)
    if pool.devices + supply.own > supply.total and not is_joined():
        raise too_few_devices(pool, supply)
    request, is_logged = Request(pool, others), False
    while not request.is_granted(_LOOK_SECONDS):
        waited = request.waited_seconds
        if waited > timeout_seconds:
            request.withdraw()
            raise too_few_devices(pool, request.supply, waited_seconds=waited)
        if waited > _QUIET_SECONDS and not is_logged:
            is_logged = True
            until = datetime.now() + timedelta(seconds=timeout_seconds - waited)
            logger.warning(
                "pool=%s waits for %d devices (%s), until %s (trainer.start_timeout_seconds=%g): %s",
                pool.name, pool.devices, pool.device, f"{until:%H:%M:%S}", timeout_seconds, request.supply,
            )  # fmt: skip
    return request.group, _slots(pool, request.group)


def _given(pool: ResourcePool) -> PlacementGroup | None:
    """The placement group that the process which started this run has reserved for the pool; None without one."""
    found = json.loads(os.environ.get(GIVEN_POOLS, "{}")).get(pool.name)
    return None if found is None else PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found)))


def _slots(pool: ResourcePool, group: PlacementGroup) -> list[Slot]:
    nodes = placement_group_table(group)["bundles_to_node_id"]
    assert pool.devices % len(nodes) == 0, f"{len(nodes)} bundles for {pool.devices} devices"
    return slots_by_rank(nodes, devices_per_bundle=pool.devices // len(nodes), block=pool.block)


def devices_by_node(pools: Mapping[ResourcePool, PlacedPool]) -> Counter[str]:
    """The devices that the pools take, by the id of their node, without those that still wait for a node."""
    found: Counter[str] = Counter()
    for pool, placed in ((pool, placed) for pool, placed in pools.items() if not pool.has_only_functions):
        nodes = placement_group_table(placed.group)["bundles_to_node_id"]
        for node in filter(None, nodes.values()):
            found[node] += pool.devices // len(nodes)
    return found


def lacks_devices(placed: PlacedPool) -> bool:
    """Whether a node of the pool is lost and Ray has not found another one."""
    return placement_group_table(placed.group)["state"] != _PLACED


def warn_of_divided_groups(spec: WorkerSpec, slots: Sequence[Slot]) -> None:
    """Warns if tensor-parallel groups of a role span nodes, because they exchange activations at every layer."""
    nodes = [slot.node for slot in slots]
    for what, ranks in (("training", spec.mesh), ("generation", spec.generation_mesh)):
        divided = divided_groups(ranks, nodes) if ranks is not None else []
        if divided and ranks is not None:
            logger.warning(
                "role=%s: %d of %d tensor-parallel groups of %s span several nodes, for example ranks %s. Every layer "
                "then waits for the network; use a tensor size that divides the devices of each node.",
                spec.role, len(divided), ranks.size // ranks.axis_size("tensor"), what, divided[0],
            )  # fmt: skip


def slots_by_rank(nodes: Mapping[int, str], *, devices_per_bundle: int, block: int) -> list[Slot]:
    """The slot of each rank, given the node of each bundle by its index.

    Ranks are numbered node by node, nodes with the most devices first, so that rank // devices_per_node is the node.
    Devices of a node that do not fill a `block` come last, so that as few blocks as possible span nodes.
    """
    held: dict[str, list[Slot]] = {}
    for bundle in sorted(nodes):
        held.setdefault(nodes[bundle], []).extend([Slot(bundle, nodes[bundle])] * devices_per_bundle)
    by_node = sorted(held.values(), key=lambda slots: -len(slots))
    whole = [slot for slots in by_node for slot in slots[: len(slots) // block * block]]
    return whole + [slot for slots in by_node for slot in slots[len(slots) // block * block :]]


def divided_groups(mesh: ParallelMesh, nodes: Sequence[str]) -> list[list[int]]:
    """The tensor-parallel groups of ranks that span several nodes, given the node of each rank."""
    return [ranks for ranks in mesh.subgroups(("tensor",)) if len({nodes[rank] for rank in ranks}) > 1]


def too_few_devices(pool: ResourcePool, supply: Supply, *, waited_seconds: float = 0.0) -> ResourceError:
    """The error for a pool that needs more devices than the cluster has left."""
    after = f" after {waited_seconds:.0f} s" if waited_seconds else ""
    lower = "lower trainer.devices or trainer.nodes (or placement.pools.<name>.devices)"
    what = pool.device if pool.resource is None else f"{pool.device}, on nodes with '{pool.resource}'"
    if pool.resource is not None and not supply.total:
        remedy = f"Correct placement.pools.{pool.name}.resource, or start nodes that have it: ray start --address=..."
        if not pool.resource.startswith(_KIND_OF_GPU):
            remedy += f" --resources='{{\"{pool.resource}\": {pool.devices}}}'"
        remedy += "."
    elif pool.devices + supply.own > supply.total:
        remedy = f"{lower.capitalize()}, or add nodes: ray start --address=... on each."
    else:
        remedy = f"Wait for the other jobs to end (see ray status), raise trainer.start_timeout_seconds, or {lower}."
    return ResourceError(
        f"The pool '{pool.name}' needs {pool.devices} devices ({what}){after}; {supply}.", remedy=remedy
    )


def _bundle(pool: ResourcePool, resource: str, devices: int) -> dict[str, float]:
    """The resources of a number of the pool's devices, which a node must have together.

    A pool that runs only reward functions requests a byte of memory per device, because a bundle cannot be empty.
    """
    if pool.has_only_functions:
        return {"memory": devices}
    if pool.resource is None:
        return {resource: devices}
    return {resource: devices, pool.resource: _SOME if pool.resource.startswith(_KIND_OF_GPU) else devices}


def no_room(pool: ResourcePool, ranks: Sequence[int], waited_seconds: float) -> NoRoom:
    """The error for lost processes that no node has room for, in a run that may continue on fewer devices."""
    return NoRoom(
        f"The processes of ranks {', '.join(map(str, ranks))} of the pool '{pool.name}' were lost, and after"
        f" {waited_seconds:.0f} s no other node has room for them.",
        remedy="Add a node, or use fewer devices, and start the same command again.",
    )


def not_replaced(pool: ResourcePool, ranks: Sequence[int], waited_seconds: float) -> ResourceError:
    """The error for processes that were lost, and for which the cluster has no devices any more."""
    return ResourceError(
        f"The processes of ranks {', '.join(map(str, ranks))} of the pool '{pool.name}' were lost, and new ones have"
        f" not started within {waited_seconds:g} s (trainer.start_timeout_seconds).",
        remedy="A node was probably lost: add one, or use fewer devices, and start the same command again. It resumes"
        " from the last checkpoint.",
    )


def _supply(pool: ResourcePool, resource: str, others: Iterable[ResourcePool]) -> Supply:
    total, free = (
        int(min(held.get(name, 0) / amount for name, amount in _bundle(pool, resource, 1).items()))
        for held in (ray.cluster_resources(), ray.available_resources())
    )
    alike = [
        other
        for other in others
        if (other.device, other.has_only_functions) == (pool.device, pool.has_only_functions)
        and pool.resource in (None, other.resource)
    ]
    return Supply(total, free, sum(other.devices for other in alike))
