"""How a model is trained: its engine, its batch sizes, its optimizer."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.model import Model
from hybridflow.config.parallelism import Parallelism
from hybridflow.config.ranges import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_TO_BELOW_1,
    NOT_BELOW_0,
    at_least,
    number,
)
from hybridflow.config.section import Section

_LEARNING_RATE = number(
    "from 0 to 1", lambda v: 0 <= v <= 1, ": AdamW moves every weight by about as much in each step"
)
_EPSILON = number(
    "of 1e-20 or more",
    lambda v: v >= 1e-20,
    ": below it, AdamW in float32 divides 0 by 0, or moves a weight without bound",
)
_RANK = at_least(0, "Use 0 (no adapter) or more.")


class TrainingEngine(Enum):
    """The machine that computes gradients."""

    auto = "auto"
    single = "single"
    fsdp = "fsdp"
    megatron = "megatron"


class Schedule(Enum):
    """How the learning rate goes on after the warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class Optimizer(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: Annotated[float, _LEARNING_RATE] = 1e-6
    """Peak learning rate."""

    weight_decay: Annotated[float, NOT_BELOW_0] = 0.0
    """Decoupled weight decay on matrices (not on norms and biases)."""

    beta1: Annotated[float, FROM_0_TO_BELOW_1] = 0.9
    """Decay of the first moment."""

    beta2: Annotated[float, FROM_0_TO_BELOW_1] = 0.999
    """Decay of the second moment."""

    epsilon: Annotated[float, _EPSILON] = 1e-8
    """Added to the root of the second moment."""

    max_grad_norm: Annotated[float, NOT_BELOW_0] = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    warmup_steps: Annotated[int, AT_LEAST_0] = 0
    """Optimizer steps over which the learning rate rises linearly; the first has the rate peak / warmup_steps."""

    schedule: Schedule = Schedule.constant
    """What follows the warm-up; linear and cosine fall to 0 at the end of step `schedule_steps`."""

    schedule_steps: Annotated[int | None, AT_LEAST_1] = None
    """Training steps until the schedule's end; null: trainer.total_steps at the run's first start. Kept when the run is
    resumed, so that another trainer.total_steps does not move the learning rate."""


@dataclass
class Lora(Section):
    """Low-rank adapters: the model stays as it is, and a small addition to some matrices is trained."""

    rank: Annotated[int, _RANK] = 0
    """Rank of the addition; 0 trains the whole model."""

    alpha: Annotated[float, ABOVE_0] = 16.0
    """The addition is scaled by alpha / rank."""

    targets: list[str] = field(default_factory=list)
    """Names of the linear layers that get one (`q_proj`); none names all but the language head."""


@dataclass
class Training(Section):
    """A trained role: the actor or the critic."""

    engine: TrainingEngine = TrainingEngine.auto
    """single: the whole model on one device; fsdp: Hugging Face models in shards; megatron: Megatron-Core.
    auto: single on one device, fsdp on several; the critic takes the actor's engine and parallelism."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the model is spread over devices."""

    model: Model = field(default_factory=Model)
    """The role's own model; the run's (`model.path`) where its path is null."""

    minibatch_size: Annotated[int | None, AT_LEAST_1] = None
    """Prompts per optimizer step, over all devices; null takes the whole batch in one step."""

    microbatch_tokens: Annotated[int, AT_LEAST_1] = 8192
    """Tokens per forward pass on each device. Lower it when memory runs out; results do not change."""

    epochs: Annotated[int, AT_LEAST_1] = 1
    """Passes over each batch."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, about a third more time; null: true on GPUs."""

    offload_parameters: bool = False
    """Keep the weights in the host's memory while the role does nothing, where they are not the rollout's as well."""

    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory; an optimizer step brings it to the device bucket by bucket."""

    lora: Lora = field(default_factory=Lora)
    """Train a low-rank addition alone (single, fsdp)."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its schedule."""
