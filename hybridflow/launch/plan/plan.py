"""Turns a composed configuration into a `RunPlan`: everything that the rules and the start of a run need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hybridflow.config.derived import CPUS, is_evaluated, is_of_cpus, max_sequence_tokens, pool_sizes, run_dir
from hybridflow.config.experiment import Experiment
from hybridflow.config.loop import BackendKind
from hybridflow.config.model import Model
from hybridflow.dataflows.evaluate import Generate
from hybridflow.dataflows.interface import Dataflow
from hybridflow.elastic.fault_recovery import fraction_of_copies
from hybridflow.engines.training.factory import tokenizer_directory
from hybridflow.errors import STRICT, Problems
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.plan.dataflow import NamedFunctions, find_dataflow, make_settings, named_functions
from hybridflow.launch.plan.defaults import (
    find_device,
    wants_old_logprobs,
    with_all_devices,
    with_device_defaults,
    with_old_logprobs_explained,
    with_reward_pool,
    with_schedule_steps,
    with_stale_logprobs,
)
from hybridflow.launch.plan.roles import ACTOR, RoleSpec, backend_kind, plan_roles, policy_model
from hybridflow.models.geometry import ModelGeometry, read_geometry
from hybridflow.models.loading import resolve_model_path
from hybridflow.workers.reward_function import RewardFunctionRole


class Models:
    """The directories and sizes of the models of a run's roles, each read once, when first asked for."""

    def __init__(self, config: Experiment, roles: Sequence[RoleSpec]) -> None:
        own = {"actor": config.actor.model, "critic": config.critic.model, "reward": config.reward.model}
        own |= {f"roles.{name}": role.model for name, role in config.roles.items()}
        self._paths = {ACTOR: (policy_model(config).path or "", _key(own, ACTOR))}
        for role in roles:
            if role.model is not None:
                self._paths[role.name] = (role.model.path or "", _key(own, role.name))
        self.directory = cache(self._directory)
        self.geometry = cache(self._geometry)

    def tokenizer_directory(self, role: str, model: Model) -> Path:
        """The directory of the tokenizer of a role's model."""
        return tokenizer_directory(model, key=self._paths[role][1])

    def _directory(self, role: str) -> Path:
        """The directory of a role's model; an error names the setting that gives it. `actor` is always known."""
        path, key = self._paths[role]
        return resolve_model_path(path, key=key)

    def _geometry(self, role: str) -> ModelGeometry:
        return read_geometry(self.directory(role))


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run. Made once; the only source of these facts."""

    composed: Composed
    asked: Composed
    """The configuration as the user wrote it, before anything in it was planned or chosen for the devices."""

    device: str
    """`cpu` or `cuda`; see `device_of` for that of a pool."""

    backend: BackendKind
    """`local` or `ray`."""

    dataflow: type[Dataflow]
    settings: object
    """The dataflow's `Settings`."""

    functions: NamedFunctions
    roles: tuple[RoleSpec, ...]
    pools: Mapping[str, int]
    """Devices of each pool."""

    policy: Model
    """The model being trained: its tokenizer is the run's."""

    models: Models
    sequence_tokens: int
    """The longest prompt and response together."""

    wants_old_logprobs: bool
    """Whether a step calls `actor.logprobs` before its update."""

    is_evaluated: bool
    """Whether the run reads held-out rows."""

    run_dir: Path

    @property
    def config(self) -> Experiment:
        """The whole configuration."""
        return self.composed.config

    def device_of(self, pool: str) -> str:
        """The devices of a pool: `cpu` or `cuda`."""
        return "cpu" if is_of_cpus(self.config, pool) else self.device

    def has_only_functions(self, pool: str) -> bool:
        """Whether a pool is `CPUS`, in a configuration that defines no pools, and none of its roles has a model."""
        own = [role for role in self.roles if role.pool == pool]
        is_implied = pool == CPUS and not self.config.placement.pools
        return is_implied and all(isinstance(role.arguments, RewardFunctionRole) for role in own)

    @property
    def only_generates(self) -> bool:
        """Whether the run samples responses that are neither scored nor trained on: `hybridflow generate`."""
        return self.dataflow is Generate

    @property
    def generates(self) -> bool:
        """Whether the run has a rollout."""
        return any(role.generates for role in self.roles)

    @property
    def trained(self) -> list[str]:
        """The names of the roles that learn."""
        return [role.name for role in self.roles if role.is_trained]


def copies_state(config: Experiment, backend: BackendKind) -> bool:
    """Whether a run on this backend keeps copies of the trained state in memory, to survive problems."""
    return fraction_of_copies(config.trainer, respawns=backend is BackendKind.ray) > 0


def plan_run(
    composed: Composed, problems: Problems = STRICT, *, device: str | None = None, has_layouts: bool = True
) -> RunPlan:
    """The plan of a composed run. Starts nothing, reads no data and no model.

    `has_layouts=False` is for a run whose layouts `automatic.py` still has to choose. `device` is `cpu` or `cuda`, by
    default what `trainer.device` chooses here. Adds to `problems` errors that leave a plan with a
    gap, such as a loss that cannot be called; raises `HybridflowError` if there is no plan, as for a dataflow that does
    not exist.
    """
    asked, dataflow = composed, find_dataflow(composed.config.dataflow)
    settings = make_settings(dataflow, composed.config.dataflow_settings, problems)
    composed = with_all_devices(composed)
    device = find_device(composed.config) if device is None else device
    composed = with_device_defaults(composed, device)
    if composed.config.trainer.epochs is None:
        composed = with_schedule_steps(composed)  # otherwise the rows must be counted first: see length.py
    composed = with_stale_logprobs(composed)
    config = composed.config
    functions = named_functions(config, dataflow, problems)
    wants = wants_old_logprobs(config, functions)
    composed = with_reward_pool(composed, dataflow, settings, wants_old_logprobs=wants)
    config = composed.config
    roles = tuple(plan_roles(config, dataflow, settings, has_layouts=has_layouts))
    return RunPlan(
        composed=with_old_logprobs_explained(composed, dataflow, wants=wants),
        asked=asked,
        device=device,
        backend=backend_kind(config),
        dataflow=dataflow,
        settings=settings,
        functions=functions,
        roles=roles,
        pools=pool_sizes(config),
        policy=policy_model(config),
        models=Models(config, roles),
        sequence_tokens=max_sequence_tokens(config),
        wants_old_logprobs=wants,
        is_evaluated=is_evaluated(config),
        run_dir=run_dir(config),
    )


def _key(own: Mapping[str, Model], role: str) -> str:
    """The setting that names a role's model."""
    section = ACTOR if role == "reward_model" else role
    named = [key for key in (section, f"roles.{role}") if key in own and own[key].path is not None]
    return f"{named[0]}.model.path" if named else "model.path"
