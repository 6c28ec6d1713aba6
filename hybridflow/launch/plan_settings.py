"""From the planner's answer to the settings of a run: what a person would write to get this placement and layout."""

import math
from collections.abc import Mapping
from dataclasses import replace

from hybridflow.config.derived import num_devices, pooled_devices
from hybridflow.config.loop import Trainer
from hybridflow.config.placement import Parallelism, PlacementKind, Pool
from hybridflow.config.roles import Role, RoleKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import ACTOR, CRITIC, ROLLOUT, RoleSpec
from hybridflow.launch.plan_request import ROLLOUT_SIZES, SIZES, SWITCHES, is_auto, planned_section
from hybridflow.launch.rules.layouts import section_of
from hybridflow.mapping.layouts import RolloutLayout, TrainingLayout
from hybridflow.mapping.memory.rollout import rollout_memory
from hybridflow.mapping.planner import PlannedStep
from hybridflow.workers.reference import ReferenceRole


def placement_settings(plan: RunPlan, pools: Mapping[str, tuple[tuple[str, ...], int]]) -> dict[str, object]:
    """The pools and the pool of every role, given the roles and the devices of each pool; other roles follow the actor.

    If generation runs ahead, reward functions follow the rollout: in the actor's pool, they would wait for generation
    in turn with the updates. Devices that the plan leaves idle are not used by the run. A placement that is given
    remains as it is.
    """
    used = sum(devices for _, devices in pools.values())
    if plan.config.placement.kind is PlacementKind.given:
        return _devices_of_run(plan, pooled_devices(plan.config) or used)
    pool_of = {role: name for name, (roles, _) in pools.items() for role in roles}
    main = pool_of.get(ACTOR) or next(iter(pools))
    roles = [role.name for role in plan.roles]
    if plan.config.asynchrony.depth and ROLLOUT in pool_of:
        functions = [role.name for role in plan.roles if role.reward is not None and role.name not in pool_of]
        pool_of |= dict.fromkeys(functions, pool_of[ROLLOUT])
    return {
        "placement.pools": {name: Pool(devices=devices) for name, (_, devices) in pools.items()},
        "placement.roles": {role: pool_of.get(role, main) for role in [*roles, *pool_of]},
        **_devices_of_run(plan, used),
    }


def _devices_of_run(plan: RunPlan, used: int) -> dict[str, object]:
    """The settings of the devices that the run uses, if they are not all for which it was planned."""
    if used == num_devices(plan.config):
        return {}
    return dict(zip(("trainer.devices", "trainer.nodes"), _nodes_of(used, plan.config.trainer), strict=True))


def _nodes_of(used: int, trainer: Trainer) -> tuple[int, int]:
    """The devices per node and the nodes of a run that leaves devices idle: whole nodes, or as many of each node."""
    if used % trainer.devices == 0:
        return trainer.devices, used // trainer.devices
    return (used // trainer.nodes, trainer.nodes) if used % trainer.nodes == 0 else (used, 1)


def layout_settings(plan: RunPlan, found: PlannedStep) -> dict[str, object]:
    """The settings of the layouts that were left to the planner."""
    settings: dict[str, object] = {}
    roles = {role.name: role for role in plan.roles}
    for name, layout in found.layouts.items():
        if isinstance(layout, RolloutLayout):
            settings |= _rollout(plan, layout, found) if is_auto(plan, ROLLOUT) else {}
        elif is_auto(plan, planned_section(plan, name)):
            settings |= _training(plan, roles[name], layout)
    return settings


def _training(plan: RunPlan, role: RoleSpec, layout: TrainingLayout) -> dict[str, object]:
    sizes = {name: vars(layout)[name] for name in SIZES} | {"sequence_parallel": layout.sequence_parallel}
    if isinstance(role.arguments, ReferenceRole) and role.name not in plan.config.roles:
        return {
            f"roles.{role.name}": Role(
                kind=RoleKind.reference,
                model=role.arguments.model,
                engine=layout.engine,
                parallelism=replace(Parallelism(), **sizes),
                microbatch_tokens=layout.microbatch_tokens,
                offload_parameters=layout.offload_parameters,
            )
        }
    section = role.name if role.name == CRITIC else section_of(plan, role.name)
    own = plan.config.roles[role.name] if role.name in plan.config.roles else vars(plan.config)[section]
    switches = {name: vars(layout)[name] for name in SWITCHES if name in vars(own)}
    settings = {f"{section}.engine": layout.engine, **_with_prefix(section, switches)}
    return settings | _with_prefix(f"{section}.parallelism", sizes)


def _rollout(plan: RunPlan, layout: RolloutLayout, found: PlannedStep) -> dict[str, object]:
    settings = _with_prefix("rollout.parallelism", {name: vars(layout)[name] for name in ROLLOUT_SIZES})
    if "rollout.max_sequences" not in plan.composed.user_keys:
        settings["rollout.max_sequences"] = layout.max_sequences
    rollout, device = found.request.rollout, found.request.cluster_of(ROLLOUT).device
    if layout.engine == RolloutKind.vllm and not device.is_cpu and rollout is not None:
        memory = rollout_memory(rollout.use, replace(layout, copies_weights=False))  # vLLM knows nothing of the copy
        share = (memory.resident_bytes + memory.extra_bytes) / device.memory_bytes
        settings["rollout.vllm.gpu_memory_fraction"] = math.ceil(100 * share) / 100
    return settings


def _with_prefix(prefix: str, values: Mapping[str, object]) -> dict[str, object]:
    return {f"{prefix}.{name}": value for name, value in values.items()}
