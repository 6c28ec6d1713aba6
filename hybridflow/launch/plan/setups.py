"""The keyword arguments of each kind of role's worker, as one dataclass per kind."""

from dataclasses import dataclass
from typing import ClassVar

from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Model
from hybridflow.config.reward import Reward
from hybridflow.config.training import Training
from hybridflow.controller.worker import Worker
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.critic import CriticWorker
from hybridflow.workers.model_worker import TrainingSetup
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.reward_function import RewardFunctionWorker
from hybridflow.workers.reward_model import RewardModelWorker
from hybridflow.workers.reward_model_trainer import RewardModelTrainer
from hybridflow.workers.rollout import RolloutSetup, RolloutWorker


@dataclass(frozen=True)
class TrainedRole:
    """A model being trained, which is part of checkpoints."""

    worker_class: ClassVar[type[Worker]]
    setup: TrainingSetup
    algorithm: Algorithm


@dataclass(frozen=True)
class ActorRole(TrainedRole):
    """The policy being trained; with a `rollout`, it also generates."""

    worker_class = ActorWorker
    rollout: RolloutSetup | None


class CriticRole(TrainedRole):
    """A value function being trained."""

    worker_class = CriticWorker


class TrainedRewardModelRole(TrainedRole):
    """A reward model being trained."""

    worker_class = RewardModelTrainer


@dataclass(frozen=True)
class ReferenceRole:
    """A frozen language model."""

    worker_class: ClassVar[type[Worker]] = ReferenceWorker
    model: Model
    training: Training
    temperature: float


@dataclass(frozen=True)
class AdapterlessActorRole:
    """The reference of a policy with a low-rank adapter: the actor's own workers, with the adapter left out."""

    worker_class: ClassVar[type[Worker]] = ActorWorker


@dataclass(frozen=True)
class RewardFunctionRole:
    """Reward functions; `model` is the policy, whose tokenizer decodes the responses."""

    worker_class: ClassVar[type[Worker]] = RewardFunctionWorker
    reward: Reward
    model: Model


@dataclass(frozen=True)
class RewardModelRole:
    """A frozen reward model, optionally with reward functions."""

    worker_class: ClassVar[type[Worker]] = RewardModelWorker
    reward: Reward
    policy: Model
    training: Training


@dataclass(frozen=True)
class RolloutRole:
    """A rollout in its own pool."""

    worker_class: ClassVar[type[Worker]] = RolloutWorker
    setup: RolloutSetup


ADAPTERLESS_METHODS = {"logprobs": "reference_logprobs"}
"""The names of that reference's methods in the actor's workers."""

RewardRole = RewardFunctionRole | RewardModelRole
RoleSetup = TrainedRole | RewardRole | ReferenceRole | AdapterlessActorRole | RolloutRole
