"""The placement of PPO that was fastest in HybridFlow's experiments (figures 12 and 13), and by prediction."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

from benchmarks.planning_published import cluster_of, geometry_of, paper_figures, paper_workload
from benchmarks.planning_report import Criterion, Section
from hybridflow.config.derived import divisors
from hybridflow.config.placement import PlacementKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.mapping.candidates import Given
from hybridflow.mapping.layouts import ModelUse
from hybridflow.mapping.operations import Operation, OperationKind
from hybridflow.mapping.planner import answer
from hybridflow.mapping.request import PlannedModel, PlannedRollout, Request

ENOUGH = 8
"""Cells of nine in which the search agrees with the paper."""

_ROLES = ("actor", "reference", "critic", "reward")
_COMPARED = {
    "colocated": {frozenset(_ROLES)},
    "split": {frozenset({"actor", "reference"}), frozenset({"critic", "reward"})},
    "standalone": {frozenset({role}) for role in _ROLES},
    "critic apart": {frozenset({"actor", "reference", "reward"}), frozenset({"critic"})},
}
"""The placements that the paper compares; the last one only in figure 13."""

_MOST_SEQUENCES = 256


class Cell(NamedTuple):
    """A column of models and a range of devices."""

    name: str
    actor: str
    """The model of the actor and the reference."""

    critic: str
    """The model of the critic and the reward."""

    devices: Sequence[int]
    published: str
    why: str
    """The reason for a difference."""

    @property
    def compared(self) -> Sequence[str]:
        """The placements that the paper compares."""
        return [name for name in _COMPARED if name != "critic apart" or self.actor != self.critic]

    def fastest(self, num_devices: int) -> str:
        """The fastest of these by prediction; `nothing fits` if no placement does."""
        seconds = predicted(self.actor, self.critic, num_devices)
        return min((name for name in self.compared if name in seconds), key=seconds.__getitem__, default="nothing fits")

    @property
    def agrees(self) -> bool:
        """Whether the published placement is the fastest on all numbers of devices on which anything fits."""
        return {self.fastest(size) for size in self.devices} - {"nothing fits"} == {self.published}


@cache
def cells() -> Sequence[Cell]:
    """The nine cells."""
    published = paper_figures()["cells"]
    found = []
    for actor, critic, winners in published["columns"]:
        models = actor if actor == critic else f"{actor} with {critic}"
        for devices, winner in winners.items():
            name = f"{models} on {devices}"
            why = published["explained"].get(name, "")
            found.append(Cell(name, actor, critic, published["devices"][devices], winner, why))
    return found


def sections() -> list[Section]:
    """The table."""
    lines = []
    for cell in cells():
        for size in cell.devices:
            seconds = predicted(cell.actor, cell.critic, size)
            numbers = ", ".join(f"{name} {seconds[name]:.0f}" for name in cell.compared if name in seconds)
            best = min(seconds, key=seconds.__getitem__, default="none")
            others = "" if best in cell.compared or not seconds else f"; search: {best} {seconds[best]:.0f}"
            models = cell.name.rsplit(" on ", 1)[0]
            lines.append(f"  {models + f', {size} devices':40} {cell.published:13} {numbers or 'nothing fits'}{others}")
        if not cell.agrees:
            lines.append(f"  differs: {cell.why}")
    right = sum(cell.agrees for cell in cells())
    unexplained = [cell.name for cell in cells() if not cell.agrees and not cell.why]
    return [
        Section(
            "HybridFlow: the fastest placement of PPO on A100-80; published, predicted seconds of those compared",
            lines,
            [
                Criterion(f"the published placement in at least {ENOUGH} of 9 cells", f"{right} of 9", right >= ENOUGH),
                Criterion("all other cells are explained", ", ".join(unexplained) or "all", not unexplained),
            ],
        )
    ]


@cache
def predicted(actor: str, critic: str, num_devices: int) -> Mapping[str, float]:
    """Predicted seconds by placement.

    The paper's split divides the devices into equal halves. Where the published sizes do not divide these, the
    largest number of stages with which they are is tried as well.
    """
    found: dict[str, float] = {}
    choices = [
        {actor: first, critic: second}
        for first in _stages(actor, num_devices)
        for second in ([first] if actor == critic else _stages(critic, num_devices))
    ]
    for stages in choices:
        for plan in answer(_request(actor, critic, num_devices, stages), num_plans=15).plans:
            pools = {frozenset(roles) - {"rollout"} for roles, _ in plan.pools.values()}
            name = next((name for name, compared in _COMPARED.items() if compared == pools), plan.plan.name)
            found[name] = min(plan.seconds, found.get(name, plan.seconds))
    return found


def _stages(model: str, num_devices: int) -> list[int]:
    """The published number of pipeline stages, and one that divides half of the devices."""
    tensor, pipeline = paper_figures()["cells"]["sizes"][model]
    half = num_devices // 2
    halves = [size for size in divisors(geometry_of(model).layers) if half % (tensor * size) == 0]
    return sorted({pipeline, *[size for size in halves if size <= pipeline][-1:]})


def _request(actor: str, critic: str, num_devices: int, stages: Mapping[str, int]) -> Request:
    """PPO as in the paper: Megatron without virtual stages and offloading; responses are generated by the actor."""
    paper = paper_figures()
    models = dict(zip(_ROLES, (actor, actor, critic, critic), strict=True))

    def planned(role: str, model: str) -> PlannedModel:
        use = ModelUse(
            geometry_of(model),
            2,
            is_trained=role in ("actor", "critic"),
            has_language_head=role in ("actor", "reference"),
        )
        sizes = {"tensor": paper["cells"]["sizes"][model][0], "pipeline": stages[model], "virtual_pipeline": 1}
        given = Given({**sizes, "offload_optimizer": False, "offload_parameters": False})
        return PlannedModel(role, use, (TrainingEngine.megatron,), given)

    cluster = cluster_of(paper["device"], num_devices, None, paper["network_gb_per_second"] * 1e9)
    workload = paper_workload()
    return Request(
        title="PPO",
        operations=ppo_operations(),
        models=tuple(planned(role, model) for role, model in models.items()),
        rollout=PlannedRollout(
            role="rollout",
            actor="actor",
            use=ModelUse(geometry_of(actor), 2, is_trained=False),
            engine=RolloutKind.vllm,
            given=Given({"max_sequences": _MOST_SEQUENCES}),
            captures_graphs=False,
        ),
        workload=workload,
        cluster=cluster,
        placement=PlacementKind.auto,
        pinned={"actor": "actor", "rollout": "actor"},
        minibatch_prompts=workload.rows // workload.optimizer_steps,
        batch_prompts=workload.rows,
    )


def ppo_operations() -> tuple[Operation, ...]:
    """The calls of a step of PPO with a reference and a reward model."""
    kinds = OperationKind
    forward = partial(Operation, kind=kinds.forward, needs=(0,))
    return (
        Operation("rollout.generate", "rollout", kinds.generate, ()),
        forward("reference.logprobs", "reference"),
        forward("critic.values", "critic"),
        forward("reward.score", "reward"),
        Operation("actor.advantages", "driver", kinds.functions, (1, 2, 3)),
        Operation("critic.update", "critic", kinds.update, (4,)),
        Operation("actor.update", "actor", kinds.update, (4,)),
        Operation("actor.publish_weights", "rollout", kinds.publish, (6,)),
    )
