"""Settings of the reward."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.model import Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1, number
from hybridflow.config.section import Section
from hybridflow.config.training import TrainingEngine

LARGEST_SCORE = 1e15
"""Largest absolute value of a score: float32 can represent its square and the sum of 1e8 squares, which advantages and
value losses need."""

OF_SCORES = number("from -1e15 to 1e15", lambda v: abs(v) <= LARGEST_SCORE)
"""Range of a score's weight."""


@dataclass
class Reward(Section):
    """Reward functions and a reward model, summed with weights."""

    functions: list[str] = field(default_factory=list)
    """Built-in names, dotted paths (`my_lib.rewards.f`), files (`path/reward.py:f`) or addresses (`http://host/path`;
    requests rotate over several, separated by spaces). A prefix (`verl:path/reward.py:f`) names the signature."""

    weights: list[Annotated[float, OF_SCORES]] = field(default_factory=list)
    """One weight per function; empty means 1 each."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of functions by their short names, such as `reward.settings.overlong.buffer_tokens=64`, and of
    addresses, such as `reward.settings.NAME.headers={Authorization: ...}`."""

    error_budget: Annotated[int, AT_LEAST_0] = 0
    """Number of samples per scoring rank whose reward may fail before the run stops; failures are counted and shown."""

    processes: Annotated[int | None, AT_LEAST_0] = None
    """Number of processes per rank that run reward functions, so that a slow or crashing function only costs its
    sample. null: one for functions that are not built in (and for `math`, `format`, `reasoning_gym`); 0: functions run
    in the worker's own process."""

    timeout_seconds: Annotated[float, ABOVE_0] = 30.0
    """Time limit per sample in these processes; a function that gets several samples at once has this time for each."""

    memory_mb: Annotated[int | None, AT_LEAST_1] = 4096
    """Memory limit of such a process and its children, above what it uses at its start, checked ten times per second;
    null sets no limit. Reserved but unused memory and mapped files do not count."""

    model: Model = field(default_factory=Model)
    """A reward model, trained by `hybridflow reward-model`, or any Hugging Face sequence-classification model."""

    model_weight: Annotated[float, OF_SCORES] = 1.0
    """Weight of the reward model's score."""

    process: bool = False
    """Whether the reward model scores every token (a process reward) instead of the whole response."""

    engine: TrainingEngine = TrainingEngine.auto
    """Engine that runs the reward model; auto: single on one device, fsdp on several."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the reward model is parallelized over the devices of its pool."""

    microbatch_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Tokens per forward pass of the reward model on each device; null: 8,192 on GPUs, 4,096 on CPUs."""

    offload_parameters: bool = False
    """Offload the reward model's weights to CPU while it is idle, if it runs on a training engine."""
