"""Role specifications to worker groups on a backend."""

import math
from collections.abc import Callable, Mapping, Sequence

from hybridflow.config.derived import pool_sizes
from hybridflow.config.experiment import Experiment
from hybridflow.controller.backends import Backend
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker_group import WorkerGroup
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.workers.weight_publisher import link_weights

Meet = Callable[[Mapping[str, ResourcePool]], None]
"""Starts the processes of pools, given by the name of a role that lives in each, and checks what they see."""


def start_roles(
    config: Experiment, specs: Sequence[RoleSpec], backend: Backend, *, meet: Meet | None = None
) -> dict[str, WorkerGroup]:
    """One worker group per role, each in its pool; a rollout without a pool of its own is a view of the actor.

    So is the reference of a policy with a low-rank adapter. `meet` is called before the first role is started.
    """
    device = config.trainer.device.name
    pools = {
        name: ResourcePool(name, size, device=device, block=_block([spec for spec in specs if spec.pool == name]))
        for name, size in pool_sizes(config).items()
    }
    if meet is not None:
        role_in = {spec.pool: spec.name for spec in reversed(specs) if spec.view_of is None}
        meet({role: pools[pool] for pool, role in role_in.items()})
    groups = {
        spec.name: WorkerGroup(
            spec.worker_class,
            pools[spec.pool],
            backend,
            role=spec.name,
            mesh=spec.mesh,
            generation_mesh=spec.generation_mesh,
            kwargs=spec.kwargs,
            minibatch_rows=spec.minibatch_rows,
        )
        for spec in specs
        if spec.view_of is None
    }
    for spec in specs:
        if spec.view_of is not None:
            groups[spec.name] = groups[spec.view_of].view(spec.name, methods=spec.methods)
    if ACTOR in groups and ROLLOUT in groups:
        link_weights(groups[ACTOR], groups[ROLLOUT])
    elif ACTOR in groups:
        groups[ROLLOUT] = groups[ACTOR].view(ROLLOUT)
    return groups


def _block(specs: Sequence[RoleSpec]) -> int:
    """How many consecutive ranks should share a node, so that no tensor-parallel group of a pool's roles spans two."""
    meshes = [mesh for spec in specs for mesh in (spec.mesh, spec.generation_mesh) if mesh is not None]
    return math.lcm(*(mesh.block(("tensor",)) for mesh in meshes))
