"""Placements and layouts that are left to hybridflow: planned for the devices that are there, and logged."""

import logging
from dataclasses import replace

import torch

from hybridflow.config.derived import num_devices
from hybridflow.config.fields import AUTO
from hybridflow.config.placement import PlacementKind
from hybridflow.errors import STRICT, ConfigError, Faults, ResourceError
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.defaults import saved_settings, with_values
from hybridflow.launch.plan.plan import RunPlan, plan_run
from hybridflow.launch.plan_request import is_automatic, request_of
from hybridflow.launch.plan_settings import layout_settings, placement_settings
from hybridflow.launch.rules.memory import available_gpus, least_unavoidable
from hybridflow.launch.step_trace import trace_step
from hybridflow.mapping.changes import least_devices
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.device_files import device_like
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.planner import Answer, PlannedStep, answer
from hybridflow.observability.formatting import counted

logger = logging.getLogger(__name__)

PLAN = "plan"
"""The origin of settings that the planner chose."""


def plan_fully(composed: Composed, faults: Faults = STRICT, *, device: str | None = None) -> RunPlan:
    """The plan of a run with every placement and layout that it leaves to hybridflow. Logs them."""
    plan = plan_run(composed, faults, device=device)
    if not is_automatic(plan):
        return plan
    check_not_placed_twice(plan)
    found = answer(request_of(plan, trace_step(plan), devices_of(plan)))
    if not found.plans:
        raise _nothing_fits(found)
    composed = with_plan(plan, found.plans[0])
    _log(found.plans[0], composed)
    return plan_run(composed, faults, device=plan.device)


def with_plan(plan: RunPlan, best: PlannedStep) -> Composed:
    """The run's configuration with the settings of a plan."""
    settings = placement_settings(plan, best.pools)
    settings |= layout_settings(plan, best)
    return with_values(plan.composed, settings, PLAN)


def devices_of(plan: RunPlan) -> Cluster:
    """The devices that the run will use."""
    trainer = plan.config.trainer
    if plan.device == "cpu":
        return cluster_of(f"{trainer.nodes}x{trainer.devices}xcpu")
    gpus = least_unavoidable(available_gpus(plan), num_devices(plan.config))
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    kind = device_like(name, 0 if gpus is None else gpus.smallest)
    logger.info("plan: GPUs of kind '%s' are planned as %s", name or "unknown", kind.device.name)
    return replace(kind, num_devices=num_devices(plan.config), devices_per_node=trainer.devices)


def check_not_placed_twice(plan: RunPlan) -> None:
    """Raises `ConfigError` if the user gives pools and leaves the placement to hybridflow as well."""
    kind, keys = plan.config.placement.kind, plan.composed.user_keys
    own = sorted(key for key in keys if key.startswith(("placement.pools", "placement.roles")))
    if own and kind is not PlacementKind.given:
        raise ConfigError(
            f"placement={kind.name} lets hybridflow choose the pools, but {', '.join(own)} is set.",
            remedy="Leave out one of them.",
        )


def _log(best: PlannedStep, composed: Composed) -> None:
    """Logs where each role runs, and what differs from the layout with which a resumed checkpoint was trained."""
    for pool, (roles, devices) in best.pools.items():
        for role in roles:
            logger.info("plan: role=%s pool=%s devices=%d %s", role, pool, devices, best.layouts[role].in_words)
    logger.info("plan: predicted seconds per step: %.3g", best.seconds)
    saved, now = saved_settings(composed.config), composed.flat()
    chosen = {key: value for key, value in now.items() if composed.origins.get(key) in (PLAN, AUTO)}
    changed = [f"{key} {saved[key]} -> {value}" for key, value in chosen.items() if saved.get(key, value) != value]
    if changed:
        logger.info("plan: changed since the checkpoint: %s", ", ".join(changed))


def _nothing_fits(found: Answer) -> ResourceError:
    request, needed = found.request, least_devices(found.request)
    cluster = request.cluster
    more = "" if needed is None else f" The smallest number that fits is {needed.request.cluster.num_devices}."
    return ResourceError(
        f"No placement of {request.title} fits on {counted(cluster.num_devices, 'device')} of kind"
        f" {cluster.device.name}.{more}",
        remedy="Use more devices. `hybridflow plan` with the same settings says what is missing and what would help.",
    )
