"""Starts the planned roles as worker groups on a backend."""

import math
from collections.abc import Callable, Mapping, Sequence

from hybridflow.controller.backends import Backend
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.workers.actor import AdapterlessActorRole
from hybridflow.workers.weight_publisher import link_weights

Meet = Callable[[Mapping[str, ResourcePool]], None]
"""Starts the processes of pools, each given by the name of a role in it, and checks their storage."""


def start_roles(
    roles: Sequence[RoleSpec], pool_sizes: Mapping[str, int], backend: Backend, *, device: str, meet: Meet | None = None
) -> dict[str, WorkerGroup]:
    """One worker group per role, each in its pool; a rollout without its own pool is a view of the actor.

    So is the reference of a policy with a LoRA adapter. `meet` is called before the first role is started.
    """
    pools = resource_pools(roles, pool_sizes, device=device)
    if meet is not None:
        role_in = {role.pool: role.name for role in reversed(roles) if role.view_of is None}
        meet({role: pools[pool] for pool, role in role_in.items()})
    groups = {
        role.name: WorkerGroup(
            role.worker_class,
            pools[role.pool],
            backend,
            role=role.name,
            mesh=role.mesh,
            generation_mesh=role.generation_mesh,
            kwargs=vars(role.arguments),
            minibatch_rows=role.minibatch_rows,
        )
        for role in roles
        if role.view_of is None
    }
    for role in roles:
        if role.view_of is not None:
            groups[role.name] = groups[role.view_of].view(role.name, methods=AdapterlessActorRole.methods)
    if ACTOR in groups and ROLLOUT in groups:
        link_weights(groups[ACTOR], groups[ROLLOUT])
    elif ACTOR in groups:
        groups[ROLLOUT] = groups[ACTOR].view(ROLLOUT)
    return groups


def resource_pools(roles: Sequence[RoleSpec], pool_sizes: Mapping[str, int], *, device: str) -> dict[str, ResourcePool]:
    """The pools of the planned roles, each in blocks of which none should span two nodes."""
    return {
        name: ResourcePool(name, size, device=device, block=_block([role for role in roles if role.pool == name]))
        for name, size in pool_sizes.items()
    }


def _block(roles: Sequence[RoleSpec]) -> int:
    """The number of consecutive ranks to place on one node, so that no tensor-parallel group of a pool spans two."""
    meshes = [mesh for role in roles for mesh in (role.mesh, role.generation_mesh) if mesh is not None]
    return math.lcm(*(mesh.block(("tensor",)) for mesh in meshes))
