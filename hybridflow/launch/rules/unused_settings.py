"""What a user asked for and does not get, because nothing in the run reads it: told by name, with the reason."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from hybridflow.config import fields
from hybridflow.config.algorithm import Algorithm, CorrectionLevel, KLPlacement
from hybridflow.config.experiment import Experiment
from hybridflow.config.rollout import RolloutKind
from hybridflow.config.training import TrainingEngine
from hybridflow.dataflows.interface import Dataflow, learns_from_preferences, learns_from_samples
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.compose.overrides import shown
from hybridflow.launch.plan.roles import ACTOR, ROLLOUT, RoleSpec
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.named_functions import (
    PREFERENCE_NUMBERS,
    PREFERENCE_OFFERS,
    estimator,
    policy_loss,
    preference_loss,
)
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.rollout import RolloutWorker

logger = logging.getLogger(__name__)

_OF_A_REWARD_MODEL = ("model", "model_weight", "process", "engine", "parallelism", "microbatch_tokens")


@dataclass(frozen=True)
class Unread:
    """Settings, or sections with all that is in them `but` some, and why nothing reads them."""

    keys: tuple[str, ...]
    why: str
    but: tuple[str, ...] = ()

    def covers(self, key: str) -> bool:
        """Whether it is said of this setting."""
        return _is_in(key, self.keys) and not _is_in(key, self.but)


def warn_of_unread(composed: Composed, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> None:
    """One line for each reason that makes settings of the user's useless; each setting is told once."""
    config, left = composed.config, _given(composed)
    by_place = _of_roles(config, specs), _of_rollout(config, dataflow, specs), _of_algorithm(config, dataflow, specs)
    for unread in chain(*by_place):
        told = {key: left.pop(key) for key in list(left) if unread.covers(key)}
        if told:
            settings = ", ".join(f"{key}={shown(value)}" for key, value in told.items())
            logger.warning("%s %s without effect: %s", settings, "are" if len(told) > 1 else "is", unread.why)


def _given(composed: Composed) -> dict[str, object]:
    """What the user said, and not the package's own files, where it is not the default anyway."""
    defaults = {key.path: _plain(key.default) for key in fields.keys()}  # noqa: SIM118 (it is no dict)
    flat = composed.flat()
    return {key: flat[key] for key in sorted(composed.said & flat.keys()) if flat[key] != defaults.get(key)}


def _plain(value: object) -> object:
    return value.name if isinstance(value, Enum) else value


def _of_roles(config: Experiment, specs: Sequence[RoleSpec]) -> Iterator[Unread]:
    """Sections of roles that the run does not have, and layouts and adapters that they do not take."""
    workers = {spec.worker_class for spec in specs}
    if CriticWorker not in workers:
        yield Unread(("critic", "algorithm.value_clip"), f"dataflow={config.dataflow} has no critic")
    elif config.critic.engine is TrainingEngine.auto:
        yield Unread(("critic.parallelism",), "critic.engine=auto takes the actor's engine and layout")
    if not workers & {RewardFunctionWorker, RewardModelWorker}:
        yield Unread(("reward",), "nothing in this run is judged")
    elif RewardModelWorker not in workers:
        yield Unread(tuple(f"reward.{name}" for name in _OF_A_REWARD_MODEL), "reward.model.path names no reward model")
    for name, training in (("actor", config.actor), ("critic", config.critic)):
        if not training.lora.rank:
            yield Unread((f"{name}.lora",), f"{name}.lora.rank=0 trains the whole model")


def _of_rollout(config: Experiment, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> Iterator[Unread]:
    """How responses are generated, where none are, or only in evaluation; places of roles that are not there."""
    has_rollout = any(s.worker_class is RolloutWorker or s.kwargs.get("rollout") is not None for s in specs)
    if not has_rollout:
        yield Unread(("rollout",), "this run generates nothing")
    elif not learns_from_samples(dataflow):
        yield Unread(
            ("rollout.sampling", "rollout.samples_per_prompt", "rollout.max_logprob_difference"),
            f"dataflow={config.dataflow} generates for its evaluation alone, as rollout.eval_sampling and"
            " rollout.eval_samples_per_prompt say",
        )
    engine = config.rollout.engine or RolloutKind.transformers
    others = tuple(f"rollout.{other.name}" for other in RolloutKind if other is not engine)
    yield Unread(others, f"rollout.engine={engine.name}")
    names = {spec.name for spec in specs} | ({ROLLOUT} if has_rollout else set())
    for role in sorted(set(config.placement.roles) - names):
        yield Unread((f"placement.roles.{role}",), f"this run has no role '{role}'")


def _of_algorithm(config: Experiment, dataflow: type[Dataflow], specs: Sequence[RoleSpec]) -> Iterator[Unread]:
    """What the trainer, or the chosen method, does not read of `algorithm`."""
    name = config.dataflow
    if learns_from_samples(dataflow):
        if dataflow.provides is not None:
            yield Unread(("algorithm.preference",), f"dataflow={name} learns from rewards, not from preferences")
        algorithms = [s.kwargs.get("algorithm") for s in specs if s.name == ACTOR and s.worker_class is ActorWorker]
        for algorithm in algorithms:
            assert isinstance(algorithm, Algorithm), f"an actor without an algorithm: {algorithm}"
            yield from _of_samples(algorithm)
    elif learns_from_preferences(dataflow):
        yield from _of_preferences(config, dataflow)
    elif dataflow.data == "preferences":
        own = "algorithm.preference.center_coefficient"
        yield Unread(("algorithm",), f"dataflow={name} ranks pairs, and reads {own} alone", but=(own,))
    elif dataflow.data == "demonstrations":
        yield Unread(("algorithm",), f"dataflow={name} imitates, and reads nothing of `algorithm`")


def _of_preferences(config: Experiment, dataflow: type[Dataflow]) -> Iterator[Unread]:
    """DPO and KTO: other algorithms' settings, and numbers that the loss does not name."""
    section = "algorithm.preference"
    sections = (section, "algorithm.loss_settings")
    yield Unread(("algorithm",), f"dataflow={config.dataflow} reads {' and '.join(sections)} alone", but=sections)
    yield Unread((f"{section}.center_coefficient",), "it is for reward models (main_reward_model)")
    loss = preference_loss(config.algorithm, PREFERENCE_OFFERS[dataflow.data])
    numbers = tuple(f"{section}.{name}" for name in PREFERENCE_NUMBERS if name not in loss.parameters)
    yield Unread(numbers, f"{section}.loss={loss.name} does not read it")
    if not loss.parameters & {"chosen_ratios", "rejected_ratios", "ratios"}:
        yield Unread((f"{section}.reference_free",), f"{section}.loss={loss.name} compares with no reference")


def _of_samples(algorithm: Algorithm) -> Iterator[Unread]:
    """Methods that learn from samples: numbers that estimator and loss do not name, parts that are turned off."""
    for key, method, numbers in (
        ("advantage", estimator(algorithm), ("gamma", "lam")),
        ("policy_loss", policy_loss(algorithm), ("clip_low", "clip_high", "dual_clip")),
    ):
        unread = tuple(f"algorithm.{name}" for name in numbers if name not in method.parameters)
        yield Unread(unread, f"algorithm.{key}={method.name} does not read it")
    if algorithm.kl.placement is KLPlacement.none:
        yield Unread(("algorithm.kl",), "algorithm.kl.placement=none looks at no reference model")
    else:
        if algorithm.kl.placement is KLPlacement.reward:
            yield Unread(
                ("algorithm.kl.allow_k1_loss",), "algorithm.kl.placement=reward puts no divergence in the loss"
            )
        if algorithm.kl.target is None:
            yield Unread(("algorithm.kl.horizon",), "algorithm.kl.target=null keeps the coefficient as it is")
    correction = "algorithm.correction"
    if algorithm.correction.weights is CorrectionLevel.none:
        yield Unread((f"{correction}.upper",), f"{correction}.weights=none")
    if algorithm.correction.reject is CorrectionLevel.none:
        yield Unread((f"{correction}.reject_upper", f"{correction}.reject_lower"), f"{correction}.reject=none")


def _is_in(key: str, sections: Sequence[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)
