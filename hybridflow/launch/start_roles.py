"""Starts the planned roles as worker groups on a backend."""

import math
from collections.abc import Callable, Mapping, Sequence

from hybridflow.controller.backends import Backend
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.workers.actor import ActorAsReferenceRole
from hybridflow.workers.weight_publisher import link_weights

Meet = Callable[[Mapping[str, ResourcePool]], None]
"""Starts the processes of pools, each given by the name of a role in it, and checks their storage."""


def start_roles(
    roles: Sequence[RoleSpec], pools: Mapping[str, ResourcePool], backend: Backend, *, meet: Meet | None = None
) -> dict[str, WorkerGroup]:
    """One worker group per role, each in its pool; a rollout without its own pool is a view of the actor.

    So is the reference of a policy with a LoRA adapter. `meet` is called before the first role is started.
    """
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
            groups[role.name] = groups[role.view_of].view(role.name, methods=ActorAsReferenceRole.methods)
    connect_rollout(groups)
    if ACTOR in groups and ROLLOUT not in groups:
        groups[ROLLOUT] = groups[ACTOR].view(ROLLOUT)
    return groups


def connect_rollout(groups: Mapping[str, WorkerGroup]) -> None:
    """Connects the actor with a rollout in another pool, when their processes have started."""
    actor, rollout = groups.get(ACTOR), groups.get(ROLLOUT)
    if actor is not None and rollout is not None and rollout.pool != actor.pool:
        link_weights(actor, rollout)


def resource_pools(plan: RunPlan) -> dict[str, ResourcePool]:
    """The pools of the planned roles, each in blocks of which none should span two nodes."""
    given = plan.config.placement.pools
    return {
        name: ResourcePool(
            name,
            size,
            device=plan.device_of(name),
            resource=given[name].resource if name in given else None,
            has_only_functions=plan.has_only_functions(name),
            block=_block([role for role in plan.roles if role.pool == name]),
        )
        for name, size in plan.pools.items()
    }


def _block(roles: Sequence[RoleSpec]) -> int:
    """The number of consecutive ranks to place on one node, so that no tensor-parallel group of a pool spans two."""
    meshes = [mesh for role in roles for mesh in (role.mesh, role.generation_mesh) if mesh is not None]
    return math.lcm(*(mesh.block(("tensor",)) for mesh in meshes))
