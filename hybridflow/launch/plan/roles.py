"""From the roles a dataflow names to worker classes, their arguments and their pools."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridflow.config.algorithm import KL, Algorithm
from hybridflow.config.choices import is_own
from hybridflow.config.derived import (
    copies_weights,
    divisors,
    is_evaluated,
    is_rewarded,
    minibatch_prompts,
    pool_of,
    pool_sizes,
    total_optimizer_steps,
    training_mesh,
    training_of,
)
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.roles import RoleKind
from hybridflow.config.training import Lora, Training
from hybridflow.controller.worker import Worker
from hybridflow.dataflows.interface import Dataflow, RoleNeed, learns_from_samples, role_needs
from hybridflow.dataflows.roles import FrozenModel, Policy, Sampler, Scorer, TrainableRewardModel, ValueFunction
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.errors import ConfigError, raised_together
from hybridflow.launch.plan.dataflow import calling
from hybridflow.parallel import ParallelMesh
from hybridflow.resharding.grouping import generation_mesh
from hybridflow.rewards.factory import with_run
from hybridflow.workers.actor import ActorAsReferenceRole, ActorRole
from hybridflow.workers.critic import CriticRole
from hybridflow.workers.model_worker import TrainedRole, TrainingSetup
from hybridflow.workers.reference import ReferenceRole
from hybridflow.workers.reward_function import RewardFunctionRole
from hybridflow.workers.reward_model import RewardModelRole
from hybridflow.workers.reward_model_trainer import TrainedRewardModelRole
from hybridflow.workers.rollout import RolloutRole, RolloutSetup

ROLLOUT = "rollout"
ACTOR = "actor"
CRITIC = "critic"

RewardRole = RewardFunctionRole | RewardModelRole
RoleArguments = TrainedRole | RewardRole | ReferenceRole | ActorAsReferenceRole | RolloutRole
"""The keyword arguments of a role's workers; each kind is declared with its worker."""

_KINDS_OF_TYPE = {
    FrozenModel: (RoleKind.reference,),
    Scorer: (RoleKind.reward_function, RoleKind.reward_model),
    ValueFunction: (RoleKind.critic,),
}
OWN_NAMES = {
    Policy: ACTOR,
    Sampler: ROLLOUT,
    ValueFunction: CRITIC,
    Scorer: "reward",
    FrozenModel: "reference",
    TrainableRewardModel: "reward_model",
}


@dataclass(frozen=True)
class RoleSpec:
    """One role to start: its worker's arguments, its pool, and the layout of its ranks."""

    name: str
    arguments: RoleArguments
    pool: str
    mesh: ParallelMesh
    """The layout of its ranks."""

    generation_mesh: ParallelMesh | None = None
    """The layout of the ranks for generation, if the role generates."""

    @property
    def worker_class(self) -> type[Worker]:
        """The class of its workers."""
        return self.arguments.worker_class

    @property
    def is_trained(self) -> bool:
        """Whether the role is trained, and therefore in checkpoints."""
        return isinstance(self.arguments, TrainedRole)

    @property
    def model(self) -> Model | None:
        """The model it runs; None for functions, and for a role that the actor's workers play."""
        match self.arguments:
            case TrainedRole() | RolloutRole():
                return self.arguments.setup.model
            case ReferenceRole():
                return self.arguments.model
            case RewardModelRole():
                return self.arguments.reward.model
        return None

    @property
    def training(self) -> Training | None:
        """How the training engine runs the model; None for roles without one."""
        match self.arguments:
            case TrainedRole():
                return self.arguments.setup.training
            case ReferenceRole() | RewardModelRole():
                return self.arguments.training
        return None

    @property
    def reward(self) -> Reward | None:
        """The reward settings of the role; None for roles that do not score."""
        return self.arguments.reward if isinstance(self.arguments, RewardRole) else None

    @property
    def minibatch_rows(self) -> int | None:
        """Rows per optimizer step, for a trained role."""
        return self.arguments.setup.minibatch_sequences if isinstance(self.arguments, TrainedRole) else None

    @property
    def view_of(self) -> str | None:
        """The role whose workers also serve this one; None for a role with its own workers."""
        return ACTOR if isinstance(self.arguments, ActorAsReferenceRole) else None

    @property
    def generates(self) -> bool:
        """Whether the role generates responses: a rollout, or an actor with one."""
        if isinstance(self.arguments, ActorRole):
            return self.arguments.rollout is not None
        return isinstance(self.arguments, RolloutRole)


def plan_roles(
    config: Experiment, dataflow: type[Dataflow], settings: object, *, has_layouts: bool = True
) -> list[RoleSpec]:
    """The roles of a dataflow with these settings. The rollout is part of the actor, unless it has its own pool.

    With `has_layouts=False`, because they still have to be chosen, the actor has no generation mesh. Raises
    `ConfigError` for a missing role or setting.
    """
    needs = {n: need for n, need in role_needs(dataflow).items() if is_wanted(config, dataflow, settings, n, need)}
    has_policy = any(need.kind is Policy for need in needs.values())
    specs = []
    with raised_together() as faults:
        faults.add(*unknown_roles(config, dataflow))
        for name, need in needs.items():
            with faults.caught():
                if need.kind is Sampler:
                    _check_own_name(config, name, need)
                    if not (has_policy and is_colocated(config)):
                        specs.append(_rollout_role(config, name, reads_weights=not has_policy))
                elif name in config.roles:
                    specs.append(_further_role(config, name, need, dataflow))
                else:
                    own = _own_role(config, name, need, dataflow, with_rollout=ROLLOUT in needs)
                    specs.append(_with_generation(config, own) if has_layouts else own)
    return specs


def unknown_roles(config: Experiment, dataflow: type[Dataflow]) -> Iterator[ConfigError]:
    """Roles of the configuration that the dataflow does not name."""
    known, owner = ", ".join(role_needs(dataflow)), dataflow.__name__
    for name in sorted(set(config.roles) - set(role_needs(dataflow))):
        found, remedy = f"roles.{name} is not a role of dataflow={config.dataflow}.", f"Its roles: {known}."
        if name in dataflow.roles:
            found = f"{owner}.roles describes '{name}', which {owner} does not name."
            remedy = f"Annotate it, as in {name}: Scorer. It names: {known}."
        yield ConfigError(found, remedy=remedy)


def backend_kind(config: Experiment) -> BackendKind:
    """local or ray; `auto` is local for one pool of one device, unless nodes may join."""
    if config.trainer.backend is not BackendKind.auto:
        return config.trainer.backend
    is_one = sum(pool_sizes(config).values()) == 1 and config.trainer.elastic.min_devices is None
    return BackendKind.local if is_one else BackendKind.ray


def training_temperature(config: Experiment, dataflow: type[Dataflow]) -> float:
    """The temperature of the logits of the policy and its reference: that of the samples that the policy is trained on.

    It is 1 if no step samples because the dataflow has no rollout, or only an optional one for the evaluation, and
    for greedy samples, as in their `rollout_logprobs`.
    """
    return (config.rollout.sampling.temperature or 1.0) if learns_from_samples(dataflow) else 1.0


def is_colocated(config: Experiment) -> bool:
    """Whether the rollout runs in the actor's processes, on its weights."""
    return pool_of(config, ROLLOUT) == pool_of(config, ACTOR)


def resolved_model(config: Experiment, model: Model) -> Model:
    """A role's model with its path filled in."""
    return replace(model if model.path else config.model)


def policy_model(config: Experiment) -> Model:
    """The model being trained: its tokenizer is the run's."""
    return resolved_model(config, config.actor.model)


def is_wanted(config: Experiment, dataflow: type[Dataflow], settings: object, name: str, need: RoleNeed) -> bool:
    """Whether a run has a role that its dataflow names. `settings` are the dataflow's."""
    if not need.is_optional or name in config.roles:
        return True
    if need.kind is FrozenModel:
        with calling(dataflow, "wants_reference"):
            return dataflow.wants_reference(config, settings)
    return need.kind in (Sampler, Scorer) and is_evaluated(config) and is_rewarded(config)


def _own_role(
    config: Experiment, name: str, need: RoleNeed, dataflow: type[Dataflow], *, with_rollout: bool
) -> RoleSpec:
    _check_own_name(config, name, need)
    if need.kind is Scorer:
        return _reward(config, name, config.reward)
    if need.kind is FrozenModel:
        if config.actor.lora.rank and pool_of(config, name) == pool_of(config, ACTOR):
            return RoleSpec(name, ActorAsReferenceRole(), pool_of(config, name), _mesh(config, name, config.actor))
        return _reference(config, name, policy_model(config), dataflow)
    setup = _training_setup(config, training_of(config, name), dataflow)
    pool, mesh = pool_of(config, name), _mesh(config, name, setup.training)
    if need.kind is ValueFunction:
        return RoleSpec(name, CriticRole(setup, _algorithm(config)), pool, mesh)
    if need.kind is TrainableRewardModel:
        return RoleSpec(name, TrainedRewardModelRole(setup, config.algorithm), pool, mesh)
    rollout = _rollout_setup(config) if with_rollout else None
    return RoleSpec(name, ActorRole(setup, _algorithm(config), rollout), pool, mesh)


def _with_generation(config: Experiment, role: RoleSpec) -> RoleSpec:
    """The role with its mesh for generation, if the rollout runs in its workers."""
    arguments, sizes = role.arguments, config.rollout.parallelism
    if not (isinstance(arguments, ActorRole) and arguments.rollout is not None and arguments.rollout.is_colocated):
        return role
    training = arguments.setup.training
    return replace(
        role,
        generation_mesh=generation_mesh(
            role.mesh,
            copies=TRAINING_ENGINES[training.engine].copies(role.mesh.sizes, training.parallelism.replicas),
            tensor=sizes.tensor,
            pipeline=sizes.pipeline,
            devices_per_node=config.trainer.devices,
        ),
    )


def _rollout_role(config: Experiment, name: str, *, reads_weights: bool) -> RoleSpec:
    """A rollout in its own pool, or without an actor: its replicas divide the prompts."""
    sizes, pool = config.rollout.parallelism, pool_of(config, name)
    replicas = pool_sizes(config)[pool] // (sizes.pipeline * sizes.tensor)
    mesh = ParallelMesh({"data": max(replicas, 1), "pipeline": sizes.pipeline, "tensor": sizes.tensor})
    apart = {"is_colocated": False, "reads_weights": reads_weights, "copies_weights": copies_weights(config)}
    return RoleSpec(name, RolloutRole(replace(_rollout_setup(config), **apart)), pool, mesh, mesh)


def _further_role(config: Experiment, name: str, need: RoleNeed, dataflow: type[Dataflow]) -> RoleSpec:
    role, expected = config.roles[name], _KINDS_OF_TYPE.get(need.kind, ())
    if role.kind not in expected:
        own = f"Leave roles.{name} out: the section '{OWN_NAMES[need.kind]}' describes it."
        names = " or ".join(f"roles.{name}.kind={kind.name}" for kind in expected)
        raise ConfigError(
            f"roles.{name}.kind={role.kind.name}, but the dataflow wants {need.kind.__name__}.",
            remedy=f"Use {names}." if expected else own,
        )
    if need.kind is ValueFunction:
        # The policy pays the divergence from the reference with the first critic's advantages. Costs rise by as much,
        # so that its weight in a mixture of the two stays what it is, as in Safe RLHF.
        paid = replace(config.algorithm.kl, coefficient=-config.algorithm.kl.coefficient)
        algorithm = replace(_algorithm(config), kl=paid if name in dataflow.cost_critics else KL())
        setup = _training_setup(config, training_of(config, name), dataflow)
        return RoleSpec(name, CriticRole(setup, algorithm), pool_of(config, name), _mesh(config, name, setup.training))
    if need.kind is FrozenModel:
        return _reference(config, name, resolved_model(config, role.model), dataflow)
    if role.kind is RoleKind.reward_function and not role.functions:
        raise ConfigError(
            f"roles.{name}.functions is empty.", remedy=f"Name one: roles.{name}.functions=[exact_match]."
        )
    if role.kind is RoleKind.reward_model and role.model.path is None:
        raise ConfigError(
            f"roles.{name}.model.path is empty.",
            remedy=f"Name the directory of a reward model, or use roles.{name}.kind=reward_function.",
        )
    own_reward = replace(
        config.reward, functions=role.functions, weights=role.weights, model=role.model, process=role.process
    )
    return _reward(config, name, own_reward)


def _reward(config: Experiment, name: str, reward: Reward) -> RoleSpec:
    """Functions alone run in workers without an engine; a reward model takes the functions with it."""
    reward, pool = with_run(reward, max_response_tokens=config.data.max_response_tokens), pool_of(config, name)
    if reward.model.path is None:
        mesh = _function_mesh(pool_sizes(config)[pool], config.data.batch_size)
        return RoleSpec(name, RewardFunctionRole(reward, policy_model(config)), pool, mesh)
    training = training_of(config, name)
    return RoleSpec(name, RewardModelRole(reward, policy_model(config), training), pool, _mesh(config, name, training))


def _function_mesh(devices: int, prompts: int) -> ParallelMesh:
    """A mesh of all devices of a pool: if there are more devices than prompts, several have the same rows."""
    data = max(size for size in divisors(max(devices, 1)) if size <= prompts)
    return ParallelMesh({"data": data, "tensor": max(devices, 1) // data})


def _reference(config: Experiment, name: str, model: Model, dataflow: type[Dataflow]) -> RoleSpec:
    training = replace(training_of(config, name), lora=Lora())
    setup = ReferenceRole(model, training, training_temperature(config, dataflow))
    return RoleSpec(name, setup, pool_of(config, name), _mesh(config, name, training))


def _mesh(config: Experiment, name: str, training: Training) -> ParallelMesh:
    sizes = training_mesh(training.parallelism, pool_sizes(config)[pool_of(config, name)])
    return ParallelMesh(sizes | {"data": max(sizes["data"], 1)})  # too few devices are a problem for the rules


def _training_setup(config: Experiment, training: Training, dataflow: type[Dataflow]) -> TrainingSetup:
    # A demonstration is one row and a pair two, whatever the evaluation or another dataflow may sample.
    samples = dataflow.rows_per_prompt or config.rollout.samples_per_prompt
    return TrainingSetup(
        model=resolved_model(config, training.model),
        training=training,
        minibatch_sequences=minibatch_prompts(config, training) * samples,
        total_optimizer_steps=total_optimizer_steps(config, training),
        max_response_tokens=config.data.max_response_tokens,
        temperature=training_temperature(config, dataflow),
    )


def _rollout_setup(config: Experiment) -> RolloutSetup:
    return RolloutSetup(
        rollout=config.rollout,
        model=policy_model(config),
        is_colocated=is_colocated(config),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_response_tokens=config.data.max_response_tokens,
        seed=config.trainer.seed,
        max_staleness=config.asynchrony.max_staleness,
        environment=config.environment,
        chat_template=config.data.chat_template,
        gamma=config.algorithm.gamma,
    )


def _algorithm(config: Experiment) -> Algorithm:
    """The settings of estimators, which do not discount per token if the environment discounts per reply."""
    is_discounted = config.environment.discounts_replies
    return replace(config.algorithm, gamma=1.0) if is_discounted else config.algorithm


def _check_own_name(config: Experiment, name: str, need: RoleNeed) -> None:
    own = OWN_NAMES[need.kind]
    if name != own:
        raise ConfigError(
            f"The dataflow names a role '{name}: {need.kind.__name__}' that the configuration does not describe.",
            remedy=f"Call it '{own}', or describe it: roles.{name}.kind=..., or `roles` in its class."
            if is_own(config.dataflow)
            else f"Use algorithm={config.dataflow}, which describes one, or say it yourself: roles.{name}.kind=...",
        )
