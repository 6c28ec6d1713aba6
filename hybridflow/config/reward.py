"""What is rewarded."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridflow.config.model import Model
from hybridflow.config.parallelism import Parallelism
from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1, number
from hybridflow.config.section import Section
from hybridflow.config.training import TrainingEngine

LARGEST_SCORE = 1e15
"""The largest score, in either direction: float32 holds the squares of such scores and the sums of 1e8 squares, which
advantages and value losses need."""

OF_SCORES = number("from -1e15 to 1e15", lambda v: abs(v) <= LARGEST_SCORE)
"""What a score may be multiplied by."""


@dataclass
class Reward(Section):
    """Reward functions and a reward model, added up with weights."""

    functions: list[str] = field(default_factory=list)
    """Built-in names, dotted paths (`my_lib.rewards.f`), files (`path/reward.py:f`) or addresses (`http://host/path`,
    several that take turns with spaces between). `verl:path/reward.py:f` says which signature to call it by."""

    weights: list[Annotated[float, OF_SCORES]] = field(default_factory=list)
    """One weight per function; empty means 1 each."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of functions by their short names: `reward.settings.overlong.buffer_tokens=64`, or of addresses, such as
    their headers: `reward.settings.NAME.headers={Authorization: ...}`."""

    error_budget: Annotated[int, AT_LEAST_0] = 0
    """Samples whose reward may fail, on each rank that scores, before the run stops; failures are counted and shown."""

    processes: Annotated[int | None, AT_LEAST_0] = None
    """Processes that each rank runs functions in, where a slow or crashing one costs its sample and nothing else.
    null: one for functions that are not built in (and for `math`, `format`, `reasoning_gym`); 0: none, all run in the
    worker's own process."""

    timeout_seconds: Annotated[float, ABOVE_0] = 30.0
    """How long a sample may take in such a process before it counts as failed; functions that are given several at a
    time have as much for each."""

    memory_mb: Annotated[int | None, AT_LEAST_1] = 4096
    """Memory that such a process, with what it starts itself, may come to use beside what it begins with, looked at ten
    times a second; null sets no limit. Memory that is reserved but unused, and mapped files, do not count."""

    model: Model = field(default_factory=Model)
    """A reward model: trained by main_reward_model, or any Hugging Face sequence-classification model."""

    model_weight: Annotated[float, OF_SCORES] = 1.0
    """The reward model's weight beside the functions'."""

    process: bool = False
    """The reward model judges every token (a process reward), not the whole response."""

    engine: TrainingEngine = TrainingEngine.auto
    """The machine that runs the reward model; auto: single on one device, fsdp on several."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the reward model is spread over the devices of its pool."""

    microbatch_tokens: Annotated[int, AT_LEAST_1] = 8192
    """Tokens per forward pass of the reward model on each device."""
