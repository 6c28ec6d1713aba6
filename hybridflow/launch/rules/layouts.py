"""Rules on layouts that need the plan: models against parallel sizes, and batches against minibatches and ranks."""

from collections import Counter
from collections.abc import Iterator

from hybridflow.config.checks import placement_errors
from hybridflow.config.derived import divisors, minibatch_prompts
from hybridflow.config.experiment import Experiment
from hybridflow.config.nearest import did_you_mean
from hybridflow.controller.protocols import GENERATION, num_parts
from hybridflow.dataflows.interface import Dataflow, learns_from_samples, role_needs
from hybridflow.dataflows.roles import Policy, TrainableRewardModel, ValueFunction
from hybridflow.engines.traits import TRAINING_ENGINES, rollout_traits
from hybridflow.errors import ConfigError
from hybridflow.launch.plan.data import RunData, eval_files_key
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import CRITIC, OWN_NAMES, ROLLOUT, RoleSpec
from hybridflow.launch.rules.models import per_role, runs_whole
from hybridflow.launch.rules.parallelism import layout_section, role_problems
from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.layouts import layout_problem


@per_role
def layout_problems(plan: RunPlan, role: RoleSpec) -> Iterator[ConfigError]:
    """Models whose heads, layers, experts or vocabulary an engine cannot divide into the requested sizes."""
    if role.model is None or runs_whole(plan, role):
        return
    geometry, engine = plan.models.geometry(role.name), rollout_traits(plan.config.rollout.engine)
    if role.training is not None:
        weights = TRAINING_ENGINES[role.training.engine].weights
        if problem := layout_problem(geometry, weights, role.training.parallelism):
            yield layout_error(section_of(plan, role.name), role.training.engine.name, problem, geometry)
    if role.generation_mesh is not None:
        if problem := layout_problem(geometry, engine.weights, plan.config.rollout.parallelism):
            yield layout_error("rollout", str(plan.config.rollout.engine), problem, geometry)


def critic_layout_problems(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """The layout of the section `critic`, which only a dataflow with a critic reads."""
    if CRITIC in role_needs(dataflow) and not any(placement_errors(config)):
        yield from role_problems(config, CRITIC)


def minibatch_problems(config: Experiment, dataflow: type[Dataflow] | None) -> Iterator[ConfigError]:
    """Minibatches of trained roles that do not divide the batch; without a dataflow, those of the actor."""
    kinds = {Policy} if dataflow is None else {need.kind for need in role_needs(dataflow).values()}
    for section, trained in (("actor", {Policy, TrainableRewardModel}), (CRITIC, {ValueFunction})):
        batch, prompts = config.data.batch_size, minibatch_prompts(config, vars(config)[section])
        if kinds & trained and batch % prompts:
            close = min(divisors(batch), key=lambda size: abs(size - prompts))
            yield ConfigError(
                f"{section}.minibatch_size={prompts} does not divide data.batch_size={batch}.",
                remedy=f"Use {close}, or another divisor: both count prompts, over all devices.",
            )


def placement_problems(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Placements of roles that no dataflow of the package and not this one has; a role left out here is a warning."""
    known = dict.fromkeys((*role_needs(dataflow), *OWN_NAMES.values()))
    for role in config.placement.roles:
        if role not in known:
            yield ConfigError(
                f"placement.roles.{role} is not a role of dataflow={config.dataflow}.",
                remedy=f"{did_you_mean(role, known)}Its roles: {', '.join(role_needs(dataflow))}.",
            )


def batch_problems(plan: RunPlan) -> Iterator[ConfigError]:
    """Minibatches that do not divide the batch, and roles with more ranks than a batch has prompts."""
    batch, dataflow = plan.config.data.batch_size, plan.dataflow
    yield from minibatch_problems(plan.config, dataflow)
    for role in plan.roles:
        ranks = role.mesh.axis_size("data")
        if role.is_trained:
            yield from _minibatches(plan, role, ranks)
        elif role.view_of is None and role.generation_mesh is None and dataflow.data == "prompts" and batch < ranks:
            yield ConfigError(
                f"data.batch_size={batch} prompts cannot be divided over the {ranks} ranks of '{role.name}'.",
                remedy=f"Give data.batch_size={ranks} or more, or {_fewer_devices(role.name)}.",
            )
        if role.generation_mesh is not None and learns_from_samples(dataflow):
            replicas = num_parts(GENERATION, role.generation_mesh)
            if batch < replicas:
                yield ConfigError(
                    f"data.batch_size={batch} prompts cannot be divided over the {replicas} rollout replicas.",
                    remedy=f"Use {replicas} or more, or a larger rollout.parallelism.tensor.",
                )


def evaluation_problems(plan: RunPlan, data: RunData | None) -> Iterator[ConfigError]:
    """Roles with more ranks than there are held-out rows; each source of held-out rows is measured separately."""
    if data is None:
        return
    questions = 0 if data.questions is None else len(data.questions)
    sources = [] if data.held_out is None else data.held_out.object("data_source")
    for role in plan.roles:
        name = role.name if role.generation_mesh is None else ROLLOUT
        if questions and (role.generation_mesh is not None or role.reward is not None):
            mesh = role.generation_mesh
            ranks = role.mesh.axis_size("data") if mesh is None else num_parts(GENERATION, mesh)
            if questions < ranks:
                key = eval_files_key(plan.config)
                yield ConfigError(
                    f"{key}: {questions} prompts cannot be divided over the {ranks} ranks of '{name}'.",
                    remedy=f"Give {ranks} prompts or more, or {_fewer_devices(name)}.",
                )
    for source, rows in Counter(sources).items():
        for role in plan.roles:
            ranks = role.mesh.axis_size("data")
            if role.is_trained and rows < ranks:
                yield ConfigError(
                    f"data.eval_files: {rows} rows of '{source}' cannot be divided over the {ranks} ranks of"
                    f" '{role.name}'.",
                    remedy=f"Give {ranks} or more of each source, or place {role.name} on fewer devices.",
                )


def layout_error(section: str, engine: str, problem: str, geometry: ModelGeometry) -> ConfigError:
    """The error of a role or the rollout whose sizes do not fit its model."""
    experts = f", {geometry.experts} experts" if geometry.experts else ""
    is_size = problem.startswith("parallelism.")
    return ConfigError(
        f"{section}.{problem}, with {section}.engine={engine}." if is_size else f"{section}.engine={engine} {problem}.",
        remedy=f"Use sizes that fit (the model has {geometry.layers} layers, {geometry.heads} heads,"
        f" {geometry.kv_heads} key-value heads{experts}, a vocabulary of {geometry.vocab}), or another engine.",
    )


def section_of(plan: RunPlan, role: str) -> str:
    """The section with a role's layout; a reference has the actor's layout."""
    if role in plan.config.roles:
        return f"roles.{role}"
    return layout_section(plan.config, role) if role in (CRITIC, "reward") else "actor"


def _minibatches(plan: RunPlan, role: RoleSpec, ranks: int) -> Iterator[ConfigError]:
    """Minibatches with fewer prompts than a trained role has ranks; further critics use the section `critic`."""
    assert role.training is not None, f"{role.name} is not trained"
    is_further = role.name in plan.config.roles
    section = CRITIC if is_further or role.name == CRITIC else "actor"
    prompts = minibatch_prompts(plan.config, role.training)
    if plan.config.data.batch_size % prompts == 0 and prompts < ranks:
        key = f"{section}.minibatch_size" if role.training.minibatch_size else "data.batch_size"
        sizes = section_of(plan, role.name)
        yield ConfigError(
            f"{key}={prompts} prompts cannot be divided over the {ranks} data-parallel ranks of {role.name}.",
            remedy=f"Use {ranks} or more, or larger sizes in {sizes}.parallelism.",
        )


def _fewer_devices(role: str) -> str:
    return f"place {role} on fewer devices (placement.pools, placement.roles.{role})"
