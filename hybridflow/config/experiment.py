"""The root of the configuration."""

from dataclasses import dataclass, field
from typing import Any

from hybridflow.config.algorithm import Algorithm
from hybridflow.config.asynchrony import Asynchrony
from hybridflow.config.data import Data
from hybridflow.config.environment import EnvironmentSettings
from hybridflow.config.loop import Trainer
from hybridflow.config.model import Model
from hybridflow.config.placement import Placement
from hybridflow.config.reward import Reward
from hybridflow.config.roles import Role
from hybridflow.config.rollout import Rollout
from hybridflow.config.section import Section
from hybridflow.config.training import Training


@dataclass
class Experiment(Section):
    """The configuration of a run. Batch sizes are global, counted over all devices; token budgets and buckets are per
    device."""

    dataflow: str = "ppo"
    """The algorithm as a program over roles: ppo, grpo, remax, dapo, sft, dpo, ..., or your own as `file.py:Class`."""

    dataflow_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the dataflow, validated against its `Settings` dataclass."""

    trainer: Trainer = field(default_factory=Trainer)
    """The run: its length, devices, evaluation and checkpoints."""

    data: Data = field(default_factory=Data)
    """The data and its batch sizes."""

    model: Model = field(default_factory=Model)
    """The model of every role that does not name its own."""

    actor: Training = field(default_factory=Training)
    """The policy being trained."""

    critic: Training = field(default_factory=Training)
    """The value model (PPO)."""

    rollout: Rollout = field(default_factory=Rollout)
    """Generation of responses."""

    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    """The environment in which the model acts, for conversations of several turns."""

    algorithm: Algorithm = field(default_factory=Algorithm)
    """Hyperparameters of the algorithm."""

    asynchrony: Asynchrony = field(default_factory=Asynchrony)
    """Generating ahead of the updates."""

    reward: Reward = field(default_factory=Reward)
    """Reward functions and the reward model."""

    roles: dict[str, Role] = field(default_factory=dict)
    """Additional roles, by name."""

    placement: Placement = field(default_factory=Placement)
    """Placement of roles on devices."""
