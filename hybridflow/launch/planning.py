"""Plans a run for any devices, without starting it: the work of `hybridflow plan`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hybridflow.config.derived import is_of_cpus, pooled_devices
from hybridflow.config.placement import Device, ParallelismKind, PlacementKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.errors import ConfigError
from hybridflow.launch.automatic import PLAN, check_not_placed_twice, devices_of, with_plan
from hybridflow.launch.compose.compose import Composed, plain
from hybridflow.launch.compose.overrides import COMMAND_LINE, OF_THE_USER, PYTHON
from hybridflow.launch.compose.run_files import COMMAND
from hybridflow.launch.compose.trainers import shown_name
from hybridflow.launch.compose.yaml_text import yaml_text
from hybridflow.launch.given_sizes import given_problems
from hybridflow.launch.plan.defaults import with_all_devices, with_values
from hybridflow.launch.plan.plan import Models, RunPlan, plan_run
from hybridflow.launch.plan_request import request_of
from hybridflow.launch.step_trace import trace_step
from hybridflow.mapping.clusters import clusters_of
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.planner import Answer, PlannedStep, answer
from hybridflow.mapping.request import Request
from hybridflow.models.catalogue import find_model
from hybridflow.models.geometry import ModelGeometry

_SIZES = ("trainer.devices", "trainer.nodes")


class KnownModels(Models):
    """The sizes of models that are here, and of others by name: `Qwen3-32B`, `13B`."""

    def _geometry(self, role: str) -> ModelGeometry:
        path, _ = self._paths[role]
        if path.startswith("builtin:") or Path(path).is_dir():
            return super()._geometry(role)
        return find_model(path).geometry


def plan_on(composed: Composed, devices: str | None, *, mean_response: float | None = None) -> tuple[RunPlan, Answer]:
    """A run on devices such as `16x8xA100-80`, and the best plans for it.

    By default, all devices of this machine or of the Ray cluster, or `trainer.devices` if the user sets it.

    Everything that the user has not set is planned. `mean_response` is as in `request_of`.
    """
    cluster, named = (None, {}) if devices is None else clusters_of(devices)
    plan, request = request_on(composed, cluster, named=named, mean_response=mean_response)
    return plan, answer(request)


def request_on(
    composed: Composed,
    cluster: Cluster | None,
    *,
    named: Mapping[str, Cluster] | None = None,
    mean_response: float | None = None,
) -> tuple[RunPlan, Request]:
    """A run on a cluster, by default the devices of `plan_on`, and its request to the planner."""
    composed = _on_all(composed) if cluster is None else _on(composed, cluster, named or {})
    if not any(key == "placement" or key.startswith("placement.") for key in composed.user_keys):
        composed = with_values(composed, {"placement.kind": PlacementKind.auto}, PLAN)
    elif composed.config.placement.kind is not PlacementKind.given and "trainer.parallelism" not in composed.user_keys:
        composed = with_values(composed, {"trainer.parallelism": ParallelismKind.auto}, PLAN)
    kind = None if cluster is None else "cpu" if cluster.device.is_cpu else "cuda"
    plan = plan_run(composed, device=kind, has_layouts=False)
    check_not_placed_twice(plan)
    plan = replace(plan, models=KnownModels(plan.config, plan.roles))
    devices, trace = cluster or devices_of(plan), trace_step(plan)
    request = request_of(plan, trace, devices, named=named, mean_response=mean_response)
    for problem in given_problems(plan, request):
        raise problem
    return plan, request


def run_file(plan: RunPlan, best: PlannedStep) -> str:
    """A run file with all settings that are not defaults, those of the plan among them."""
    composed = with_plan(plan, best)
    kinds = ("placement.kind", "trainer.parallelism")
    kept = {
        key: plain(value)
        for key, value in composed.flat().items()
        if composed.origins.get(key) in (PLAN, "file", "dataflow", *OF_THE_USER)
        and not (key in kinds or key.endswith(".parallelism.kind") or _is_usual(key, value))
    }
    return yaml_text({COMMAND: shown_name(composed.trainer), **kept})


def _is_usual(key: str, value: object) -> bool:
    """Whether a setting of a pool has its default."""
    name, usual = key.rpartition(".")[2], {"device": Device.auto.name, "resource": None}
    return key.startswith("placement.pools.") and name in usual and value == usual[name]


def _on_all(composed: Composed) -> Composed:
    """The same run on all devices that are here, unless the user says on how many it runs."""
    if composed.user_keys.intersection(_SIZES) or composed.config.placement.pools:
        return composed
    here = with_all_devices(with_values(composed, {"trainer.devices": 0}, PLAN)).config.trainer
    return with_values(composed, dict(zip(_SIZES, (here.devices, here.nodes), strict=True)), PLAN)


def _on(composed: Composed, cluster: Cluster, named: Mapping[str, Cluster]) -> Composed:
    """The same run on the devices of a cluster; a rollout on GPUs uses vLLM, whether or not it is installed here."""
    nodes = cluster.num_devices // cluster.devices_per_node
    others = sum(each.num_devices for pool, each in named.items() if not is_of_cpus(composed.config, pool))
    given, there = pooled_devices(composed.config), cluster.num_devices + others
    if given > there:
        raise ConfigError(
            f"The pools of this run have {given:,} devices, but --on has {there:,}.",
            remedy="Plan it on as many devices, or leave out placement.pools and placement.roles to place it again.",
        )
    sizes = (there, 1) if others else (cluster.devices_per_node, nodes)
    values: dict[str, object] = dict(zip(_SIZES, sizes, strict=True))
    _check_same_sizes(composed, values)
    if not cluster.device.is_cpu and composed.config.rollout.engine is None:
        values["rollout.engine"] = RolloutKind.vllm.value
    return with_values(composed, values, PLAN)


def _check_same_sizes(composed: Composed, there: Mapping[str, object]) -> None:
    """Raises `ConfigError` if the user has typed other numbers of devices than those to plan on.

    A run file may have others: it is planned for these. So may a run with pools of its own, which leaves the rest idle.
    """
    trainer = composed.config.trainer
    typed = {key for key in _SIZES if composed.origins.get(key) in (COMMAND_LINE, PYTHON)}
    given: dict[str, object] = dict(zip(_SIZES, (trainer.devices, trainer.nodes), strict=True))
    differing = [key for key in _SIZES if key in typed and given[key] and given[key] != there[key]]
    if differing and not composed.config.placement.pools:
        shown, of = (" ".join(f"{key}={each[key]}" for key in differing) for each in (given, there))
        raise ConfigError(
            f"{shown} contradicts the devices of --on, which are {of}.",
            remedy=f"Leave out {' and '.join(differing)}, or name as many devices with --on.",
        )
