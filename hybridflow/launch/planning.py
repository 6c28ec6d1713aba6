"""Plans a run for any devices, without starting it: the work of `hybridflow plan`."""

from dataclasses import replace
from pathlib import Path

import yaml

from hybridflow.config.placement import PlacementKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.launch.automatic import PLAN, check_not_placed_twice, devices_of, with_plan
from hybridflow.launch.compose.compose import Composed, plain
from hybridflow.launch.compose.overrides import OF_THE_USER
from hybridflow.launch.compose.run_files import COMMAND
from hybridflow.launch.compose.trainers import shown_name
from hybridflow.launch.plan.defaults import with_values
from hybridflow.launch.plan.plan import Models, RunPlan, plan_run
from hybridflow.launch.plan_request import request_of
from hybridflow.launch.step_trace import trace_step
from hybridflow.mapping.clusters import cluster_of
from hybridflow.mapping.devices import Cluster
from hybridflow.mapping.planner import Answer, PlannedStep, answer
from hybridflow.models.catalogue import find_model
from hybridflow.models.geometry import ModelGeometry

CPU = "CPU"


class KnownModels(Models):
    """The sizes of models that are here, and of others by name: `Qwen3-32B`, `13B`."""

    def _geometry(self, role: str) -> ModelGeometry:
        path, _ = self._paths[role]
        if path.startswith("builtin:") or Path(path).is_dir():
            return super()._geometry(role)
        return find_model(path).geometry


def plan_on(composed: Composed, devices: str | None, *, mean_response: float | None = None) -> tuple[RunPlan, Answer]:
    """A run on devices such as `16x8xA100-80`, by default those that are here, and the best plans for it.

    Everything that the user has not set is planned. `mean_response` is as in `request_of`.
    """
    cluster = None if devices is None else cluster_of(devices)
    if cluster is not None:
        composed = _on(composed, cluster)
    if not any(key == "placement" or key.startswith("placement.") for key in composed.user_keys):
        composed = with_values(composed, {"placement.kind": PlacementKind.auto}, PLAN)
    kind = None if cluster is None else "cpu" if cluster.device.name == CPU else "cuda"
    plan = plan_run(composed, device=kind)
    check_not_placed_twice(plan)
    plan = replace(plan, models=KnownModels(plan.config, plan.roles))
    request = request_of(plan, trace_step(plan), cluster or devices_of(plan), mean_response=mean_response)
    return plan, answer(request)


def run_file(plan: RunPlan, best: PlannedStep) -> str:
    """A run file with all settings that are not defaults, those of the plan among them."""
    composed = with_plan(plan, best)
    kinds = ("placement.kind", "trainer.parallelism")
    kept = {
        key: plain(value)
        for key, value in composed.flat().items()
        if composed.origins.get(key) in (PLAN, "file", "dataflow", *OF_THE_USER)
        and not (key in kinds or key.endswith(".parallelism.kind"))
    }
    return yaml.safe_dump({COMMAND: shown_name(composed.trainer), **kept}, sort_keys=False)


def _on(composed: Composed, cluster: Cluster) -> Composed:
    """The same run on the devices of a cluster; a rollout on GPUs uses vLLM, whether or not it is installed here."""
    nodes = cluster.num_devices // cluster.devices_per_node
    values: dict[str, object] = {"trainer.devices": cluster.devices_per_node, "trainer.nodes": nodes}
    if cluster.device.name != CPU and composed.config.rollout.engine is None:
        values["rollout.engine"] = RolloutKind.vllm.value
    return with_values(composed, values, PLAN)
