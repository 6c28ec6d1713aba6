"""Placements and layouts that are left to hybridflow: planned for the devices that are there, and logged."""

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import torch

from hybridflow.config.derived import leaves_open, num_devices
from hybridflow.config.placement import ParallelismKind, PlacementKind
from hybridflow.elastic.compatibility import is_other_run
from hybridflow.errors import STRICT, ConfigError, HybridflowError, Problems, ResourceError
from hybridflow.launch.compose.compose import Composed, compose_run
from hybridflow.launch.compose.overrides import given_settings
from hybridflow.launch.given_sizes import given_problems
from hybridflow.launch.plan.defaults import saved_settings, with_values
from hybridflow.launch.plan.layouts import run_layouts
from hybridflow.launch.plan.plan import RunPlan, plan_run
from hybridflow.launch.plan.roles import ROLLOUT
from hybridflow.launch.plan_request import is_automatic, request_of
from hybridflow.launch.plan_settings import layout_settings, placement_settings
from hybridflow.launch.rules.memory import available_gpus, least_unavoidable
from hybridflow.launch.step_trace import trace_step
from hybridflow.mapping.changes import least_devices
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.device_files import device_like, find_device
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.planner import Answer, PlannedStep, answer
from hybridflow.observability.formatting import counted

logger = logging.getLogger(__name__)

PLAN = "plan"
"""The origin of settings that the planner chose."""

_PLANNED_FROM = ("actor.", "critic.", "data.", "model.", "placement.", "reward.", "roles.", "rollout.", "algorithm.")
"""Sections of settings that a plan depends on."""


def plan_fully(
    composed: Composed, problems: Problems = STRICT, *, device: str | None = None, before: RunPlan | None = None
) -> RunPlan:
    """The plan of a run with every placement and layout that it leaves to hybridflow. Logs them.

    `before` is the plan of a run that may change its devices; nothing is logged if the number stays the same.
    """
    is_decided = before is None and not leaves_open(composed.config)
    plan = plan_run(composed, problems, device=device, has_layouts=is_decided)
    if not is_automatic(plan):
        return plan if is_decided else replace(plan_run(plan.composed, problems, device=plan.device), asked=composed)
    check_not_placed_twice(plan)
    request = request_of(plan, trace_step(plan), devices_of(plan))
    for problem in given_problems(plan, request):
        raise problem
    found = answer(request)
    if not found.plans:
        raise _nothing_fits(found)
    planned = with_plan(plan, found.plans[0])
    if before is None:
        _log(found.plans[0], planned)
    elif num_devices(planned.config) != num_devices(before.config):
        logger.info("old plan: %s", "; ".join(_lines_of(before)))
        logger.info("new plan: %s", "; ".join(_lines_of_planned(found.plans[0])))
    return replace(plan_run(planned, problems, device=plan.device), asked=composed)


def with_plan(plan: RunPlan, best: PlannedStep) -> Composed:
    """The run's configuration with the settings of a plan."""
    settings = placement_settings(plan, best.pools)
    settings |= layout_settings(plan, best)
    return with_values(plan.composed, settings, PLAN)


def devices_of(plan: RunPlan) -> Cluster:
    """The devices that the run will use."""
    trainer = plan.config.trainer
    if trainer.device_file is not None:
        described = find_device(trainer.device_file)
        if described.device.is_cpu != (plan.device == "cpu"):
            kinds = {True: "CPU", False: "GPU"}
            raise ConfigError(
                f"trainer.device_file={trainer.device_file} describes a {kinds[described.device.is_cpu]}, and the run"
                f" uses a {kinds[plan.device == 'cpu']}.",
                remedy="Calibrate the devices of this run: hybridflow plan --calibrate FILE.yaml.",
                key="trainer.device_file",
            )
        return replace(described, num_devices=num_devices(plan.config), devices_per_node=trainer.devices)
    if plan.device == "cpu":
        return cluster_of(f"{trainer.nodes}x{trainer.devices}xcpu")
    gpus = least_unavoidable(available_gpus(plan), num_devices(plan.config))
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    kind = device_like(name, 0 if gpus is None else gpus.smallest)
    logger.info(
        "plan: GPUs named '%s' are described as %s (trainer.device_file describes others)",
        name or "unknown",
        kind.device.name,
    )
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


def as_recorded(settings: Mapping[str, object], trainer: str) -> Composed:
    """The configuration that a run recorded, with all values that it had: nothing is left to the planner again."""
    composed = compose_run(given_settings(settings), config_name=trainer)
    kinds = [key for key in composed.flat() if key.endswith(".parallelism.kind")]
    values = dict.fromkeys(["trainer.parallelism", *kinds], ParallelismKind.given)
    return with_values(composed, {"placement.kind": PlacementKind.given, **values}, PLAN)


def _log(best: PlannedStep, composed: Composed) -> None:
    """Logs where each role runs; for a resumed run also where it ran before, and why that changes."""
    new = _lines_of_planned(best)
    saved, old = saved_settings(composed.config), []
    if saved and not is_other_run(saved, composed.redacted()):
        with suppress(HybridflowError):  # of another version, or with files that are no longer there
            device = str(saved.get("trainer.device"))
            old = _lines_of(plan_run(as_recorded(saved, composed.trainer), device=device))
    is_changed = bool(old) and sorted(old) != sorted(new)
    if is_changed:
        logger.info("plan: differs from the checkpoint's, because %s", _why(saved, best, composed))
        for line in old:
            logger.info("old plan: %s", line)
    for line in new:
        logger.info("%s: %s", "new plan" if is_changed else "plan", line)
    logger.info("plan: predicted seconds per step: %.3g", best.seconds)


def _lines_of_planned(best: PlannedStep) -> list[str]:
    return [
        f"role={role} pool={pool} devices={devices} {best.layouts[role].in_words}"
        for pool, (roles, devices) in best.pools.items()
        for role in roles
    ]


def _lines_of(plan: RunPlan) -> list[str]:
    """Where each role of a planned run runs, as lines of the log."""
    pools = {role.name: role.pool for role in plan.roles}
    pools[ROLLOUT] = next((role.pool for role in plan.roles if role.generates), "")
    return [
        f"role={role} pool={pools[role]} devices={plan.pools[pools[role]]} {layout.in_words}"
        for role, layout in run_layouts(plan, device_bytes=None).items()
    ]


def _why(saved: Mapping[str, object], best: PlannedStep, composed: Composed) -> str:
    """The differences from the settings of a checkpoint that lead to another plan."""
    now, device = composed.flat(), saved.get("trainer.device")
    sizes = [size for key in ("trainer.devices", "trainer.nodes") if isinstance(size := saved.get(key), int)]
    before, after = math.prod(sizes), best.request.cluster.num_devices
    changes = [f"the run has {counted(after, 'device')} instead of {before}"] if before != after else []
    if device != now["trainer.device"]:
        changes.append(f"its devices are {now['trainer.device']} instead of {device}")
    typed = [key for key in sorted(composed.user_keys & saved.keys()) if key.startswith(_PLANNED_FROM)]
    changes += [f"{key} is {now[key]} instead of {saved[key]}" for key in typed if now.get(key) != saved[key]]
    return ", and ".join(changes) or "the planner's models or the description of the devices have changed"


def _nothing_fits(found: Answer) -> ResourceError:
    request, needed = found.request, least_devices(found.request)
    cluster = request.cluster
    more = "" if needed is None else f" The smallest number that fits is {needed.request.cluster.num_devices}."
    return ResourceError(
        f"No placement of {request.title} fits on {counted(cluster.num_devices, 'device')} of kind"
        f" {cluster.device.name}.{more}",
        remedy="Use more devices. `hybridflow plan` with the same settings says what is missing and what would help.",
    )
