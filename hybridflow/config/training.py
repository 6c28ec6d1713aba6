"""How a model is trained: its engine, its batch sizes, its optimizer."""

from dataclasses import dataclass, field
from enum import Enum

from hybridflow.config.model import Model
from hybridflow.config.parallelism import Parallelism
from hybridflow.config.section import Section


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

    learning_rate: float = 1e-6
    """Peak learning rate."""

    weight_decay: float = 0.0
    """Decoupled weight decay on matrices (not on norms and biases)."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.999
    """Decay of the second moment."""

    epsilon: float = 1e-8
    """Added to the root of the second moment; at least 1e-20."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off."""

    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly; the first has the rate peak / warmup_steps."""

    schedule: Schedule = Schedule.constant
    """What follows the warm-up; linear and cosine fall to 0 at the end of step `schedule_steps`."""

    schedule_steps: int | None = None
    """Training steps until the schedule's end; null: trainer.total_steps at the run's first start. Kept when the run is
    resumed, so that another trainer.total_steps does not move the learning rate."""


@dataclass
class Lora(Section):
    """Low-rank adapters: the model stays as it is, and a small addition to some matrices is trained."""

    rank: int = 0
    """Rank of the addition; 0 trains the whole model."""

    alpha: float = 16.0
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

    minibatch_size: int | None = None
    """Prompts an optimizer step, over all devices; null takes the whole batch in one step."""

    microbatch_tokens: int = 8192
    """Tokens per forward pass on each device. Lower it when memory runs out; results do not change."""

    epochs: int = 1
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
