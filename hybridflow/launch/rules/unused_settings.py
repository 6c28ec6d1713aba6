"""Rules on settings that have no effect: set by the user, but read by nothing in the run; with the reason."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from hybridflow.config import fields
from hybridflow.config.algorithm import Algorithm, CorrectionLevel, KLPlacement
from hybridflow.config.loop import BackendKind
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.controller.backends import joined_gpus
from hybridflow.dataflows.interface import learns_from_preferences, learns_from_samples
from hybridflow.errors import Advice
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.compose.overrides import shown
from hybridflow.launch.plan.plan import RunPlan
from hybridflow.launch.plan.roles import OWN_NAMES, ROLLOUT, is_colocated
from hybridflow.workers.actor import ActorRole
from hybridflow.workers.critic import CriticRole
from hybridflow.workers.named_functions import PREFERENCE_NUMBERS, NamedFunction
from hybridflow.workers.reward_model import RewardModelRole

_OF_A_REWARD_MODEL = (
    "model", "model_weight", "process", "engine", "parallelism", "microbatch_tokens", "offload_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Unused:
    """Settings, or whole sections except for `but`, and why nothing reads them."""

    keys: tuple[str, ...]
    why: str
    but: tuple[str, ...] = ()

    def covers(self, key: str) -> bool:
        """Whether this setting is one of them."""
        return _is_in(key, self.keys) and not _is_in(key, self.but)


def unused_settings(plan: RunPlan) -> Iterator[Advice]:
    """One warning per reason why settings of the user have no effect; each setting is named once."""
    left = _given(plan.composed)
    for unused in (
        *_of_roles(plan),
        *_of_rollout(plan),
        *_of_algorithm(plan),
        *_of_checkpoints(plan),
        *_of_faults(plan),
        *_of_asynchrony(plan),
    ):
        found = {key: left.pop(key) for key in list(left) if unused.covers(key)}
        if found:
            settings = ", ".join(f"{key}={shown(value)}" for key, value in found.items())
            has_have, it = ("have", "them") if len(found) > 1 else ("has", "it")
            yield Advice(f"{settings} {has_have} no effect: {unused.why}.", remedy=f"Leave {it} out.")


def _given(composed: Composed) -> dict[str, object]:
    """The settings that the user gave, in files or on the command line, and that differ from the default."""
    defaults = {key.path: key.default for key in fields.keys()}  # noqa: SIM118 (a function, not a dict)
    defaults = {key: value.name if isinstance(value, Enum) else value for key, value in defaults.items()}
    flat = composed.flat()
    return {key: flat[key] for key in sorted(composed.user_keys & flat.keys()) if flat[key] != defaults.get(key)}


def _of_roles(plan: RunPlan) -> Iterator[Unused]:
    """Sections of roles that the run does not have, and layouts and adapters that roles do not use."""
    config = plan.config
    if not any(isinstance(role.arguments, CriticRole) for role in plan.roles):
        yield Unused(("critic", "algorithm.value_clip"), f"dataflow={config.dataflow} has no critic")
    elif config.critic.engine is TrainingEngine.auto:
        yield Unused(("critic.parallelism",), "critic.engine=auto takes the actor's engine and layout")
    if not any(role.reward is not None for role in plan.roles):
        yield Unused(("reward",), "this run scores no responses")
    elif not any(isinstance(role.arguments, RewardModelRole) for role in plan.roles):
        yield Unused(tuple(f"reward.{name}" for name in _OF_A_REWARD_MODEL), "reward.model.path names no reward model")
    for name, training in (("actor", config.actor), ("critic", config.critic)):
        if not training.lora.rank:
            yield Unused((f"{name}.lora",), f"{name}.lora.rank=0 trains the whole model")


def _of_asynchrony(plan: RunPlan) -> Iterator[Unused]:
    """Settings of generation ahead in a run without it, and of partial rollouts in a run with whole batches."""
    settings = plan.config.asynchrony
    if not settings.max_staleness:
        further = ("asynchrony.when_stale", "rollout.transfer.overlap") if settings.partial_rollouts else ()
        yield Unused(("asynchrony.ahead", *further), "asynchrony.max_staleness=0 generates nothing ahead")
    if not settings.partial_rollouts:
        names = ("when_stale", "deadline_tokens", "on_deadline", "replay")
        keys = (*(f"asynchrony.{name}" for name in names), "rollout.transfer.overlap")
        yield Unused(keys, "asynchrony.partial_rollouts=false generates whole batches")
        return
    if settings.deadline_tokens is None:
        yield Unused(("asynchrony.on_deadline",), "asynchrony.deadline_tokens sets no deadline")
    if is_colocated(plan.config) or plan.backend is BackendKind.local:
        yield Unused(("rollout.transfer.overlap",), "the rollout has no pool of its own")


def _of_checkpoints(plan: RunPlan) -> Iterator[Unused]:
    """Settings of the checkpoints that are kept."""
    trainer, which = plan.config.trainer, ("trainer.best_metric", "trainer.greater_is_better")
    if not trainer.save_every:
        names = ("async_save", "checkpoint_url", "keep_checkpoints", "keep_every", "keep_best")
        kept = tuple(f"trainer.{name}" for name in names)
        yield Unused((*kept, *which), "trainer.save_every=0 saves no checkpoints")
    elif not trainer.keep_best:
        yield Unused(which, "trainer.keep_best=0 compares no checkpoints")


def _of_faults(plan: RunPlan) -> Iterator[Unused]:
    """Settings of the devices and processes with which a run continues after faults."""
    trainer, spare = plan.config.trainer, ("trainer.spare_processes",)
    if trainer.elastic.min_devices is None:
        yield Unused(("trainer.elastic",), "trainer.elastic.min_devices=null never changes the devices")
    elif plan.backend is BackendKind.ray and joined_gpus(plan.backend.name) is None:
        yield Unused(("trainer.elastic",), "no node joins or leaves the Ray that the run starts (set RAY_ADDRESS)")
    if plan.backend is not BackendKind.ray:
        yield Unused(spare, "trainer.backend=local has no worker processes")
    elif not trainer.max_faults:
        yield Unused(spare, "trainer.max_faults=0 ends the run at the first fault")
    elif all(plan.device_of(pool) != "cpu" for pool in plan.pools):
        yield Unused(spare, "spare processes replace only those of pools of CPUs")


def _of_rollout(plan: RunPlan) -> Iterator[Unused]:
    """Settings of a rollout that the run does not have, or has only for evaluation; placements of roles it lacks."""
    config = plan.config
    if not plan.generates:
        yield Unused(("rollout",), "this run generates nothing")
    elif not learns_from_samples(plan.dataflow):
        yield Unused(
            ("rollout.sampling", "rollout.samples_per_prompt", "rollout.max_logprob_difference"),
            f"dataflow={config.dataflow} generates only for its evaluation, with rollout.eval_sampling and"
            " rollout.eval_samples_per_prompt",
        )
    engine = config.rollout.engine or RolloutKind.transformers
    others = tuple(f"rollout.{other}" for other in RolloutKind if other != engine)
    yield Unused(others, f"rollout.engine={engine}")
    names = {role.name for role in plan.roles} | ({ROLLOUT} if plan.generates else set())
    for role in sorted(set(config.placement.roles) & {*OWN_NAMES.values()} - names):
        yield Unused((f"placement.roles.{role}",), f"this run has no role '{role}'")


def _of_algorithm(plan: RunPlan) -> Iterator[Unused]:
    """Settings of `algorithm` that the trainer or the selected functions do not read."""
    name, dataflow = plan.config.dataflow, plan.dataflow
    if learns_from_samples(dataflow):
        if dataflow.provides is not None:
            yield Unused(("algorithm.preference",), f"dataflow={name} learns from rewards, not from preferences")
        if any(isinstance(role.arguments, ActorRole) for role in plan.roles):
            yield from _of_functions(plan)
            yield from _of_parts(plan.config.algorithm)
    elif learns_from_preferences(dataflow):
        yield from _of_preferences(plan)
    elif dataflow.data == "preferences":
        own = "algorithm.preference.center_coefficient"
        yield Unused(("algorithm",), f"dataflow={name} trains a reward model, which reads only {own}", but=(own,))
    elif dataflow.data == "demonstrations":
        yield Unused(("algorithm",), f"dataflow={name} is supervised and reads nothing of `algorithm`")


def _of_preferences(plan: RunPlan) -> Iterator[Unused]:
    """DPO and KTO: other algorithms' settings, and numbers that the loss does not name."""
    section, loss = "algorithm.preference", plan.functions.preference_loss
    sections = (section, "algorithm.loss_settings")
    yield Unused(("algorithm",), f"dataflow={plan.config.dataflow} reads only {' and '.join(sections)}", but=sections)
    yield Unused((f"{section}.center_coefficient",), "it is for reward models (hybridflow reward-model)")
    if loss is None:
        return
    numbers = tuple(f"{section}.{name}" for name in PREFERENCE_NUMBERS if name not in loss.parameters)
    yield Unused(numbers, f"{section}.loss={loss.name} does not read it")
    if not loss.parameters & {"chosen_ratios", "rejected_ratios", "ratios"}:
        yield Unused((f"{section}.reference_free",), f"{section}.loss={loss.name} uses no reference model")


def _of_functions(plan: RunPlan) -> Iterator[Unused]:
    """Numbers that the estimator and the policy loss do not name."""
    of_estimator, of_loss = ("gamma", "lam"), ("clip_low", "clip_high", "dual_clip")
    found: tuple[tuple[str, NamedFunction | None, tuple[str, ...]], ...] = (
        ("advantage", plan.functions.estimator, of_estimator),
        ("policy_loss", plan.functions.policy_loss, of_loss),
    )
    for key, function, numbers in found:
        if function is not None:
            unused = tuple(f"algorithm.{name}" for name in numbers if name not in function.parameters)
            yield Unused(unused, f"algorithm.{key}={function.name} does not read it")


def _of_parts(algorithm: Algorithm) -> Iterator[Unused]:
    """Settings of the parts of an algorithm that are turned off."""
    kl, correction = "algorithm.kl", "algorithm.correction"
    if algorithm.kl.placement is KLPlacement.none:
        yield Unused((kl,), f"{kl}.placement=none uses no reference model")
    else:
        if algorithm.kl.placement is KLPlacement.reward:
            yield Unused((f"{kl}.allow_k1_loss",), f"{kl}.placement=reward puts no divergence in the loss")
        if algorithm.kl.target is None:
            yield Unused((f"{kl}.horizon",), f"{kl}.target=null keeps the coefficient constant")
    if algorithm.correction.weights is CorrectionLevel.none:
        yield Unused((f"{correction}.upper",), f"{correction}.weights=none")
    if algorithm.correction.reject is CorrectionLevel.none:
        yield Unused((f"{correction}.reject_upper", f"{correction}.reject_lower"), f"{correction}.reject=none")


def _is_in(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
