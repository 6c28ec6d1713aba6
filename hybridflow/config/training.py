"""Settings of training: engine, batch sizes and optimizer."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.guards import Guards
from hybridflow.config.model import Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.ranges import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FROM_0_TO_BELOW_1, NOT_BELOW_0, at_least, number
from hybridflow.config.section import Section

_LEARNING_RATE = number(
    "from 0 to 1", lambda v: 0 <= v <= 1, ": AdamW changes every weight by about this much per step"
)
_EPSILON = number("of 1e-20 or more", lambda v: v >= 1e-20, ": below it, AdamW in float32 can divide by 0")
MICROBATCH_TOKENS = {"cpu": 4096, "cuda": 8192}
"""Defaults of `microbatch_tokens`. On a CPU, the C library returns larger temporary tensors to the operating system
after each operation, and getting new pages takes longer than most operations."""

_RANK = at_least(0, "Use 0 (no adapter) or more.")


class TrainingEngine(Enum):
    """Engine that trains a model."""

    auto = "auto"
    single = "single"
    fsdp = "fsdp"
    megatron = "megatron"


class Schedule(Enum):
    """Learning-rate schedule after the warm-up."""

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
    """Added to the square root of the second moment for numerical stability."""

    max_grad_norm: Annotated[float, NOT_BELOW_0] = 1.0
    """Maximum global gradient norm for clipping; 0 turns clipping off."""

    warmup_steps: Annotated[int, AT_LEAST_0] = 0
    """Optimizer steps over which the learning rate rises linearly, from peak / warmup_steps in the first."""

    schedule: Schedule = Schedule.constant
    """Schedule after the warmup; linear and cosine decay to 0 at training step `schedule_steps`."""

    schedule_steps: Annotated[int | None, AT_LEAST_1] = None
    """Training steps until the end of the schedule; null: trainer.total_steps when the run first starts. Kept when the
    run is resumed, so that a different trainer.total_steps does not change the learning rate."""


@dataclass
class Lora(Section):
    """LoRA: freeze the model and train low-rank adapters on some weight matrices."""

    rank: Annotated[int, _RANK] = 0
    """Rank of the adapters; 0 trains the whole model."""

    alpha: Annotated[float, ABOVE_0] = 16.0
    """The adapters are scaled by alpha / rank."""

    targets: list[str] = field(default_factory=list)
    """Names of the linear layers with adapters (`q_proj`); empty means all but the language-model head."""


@dataclass
class Training(Section):
    """Training settings of a role (actor or critic)."""

    engine: TrainingEngine = TrainingEngine.auto
    """single: the whole model on one device; fsdp: Hugging Face models in shards; megatron: Megatron-Core. auto: single
    on one device, fsdp on several; a critic with auto uses the actor's engine and parallelism."""

    parallelism: Parallelism = field(default_factory=Parallelism)
    """How the model is parallelized over devices."""

    model: Model = field(default_factory=Model)
    """The role's model; a null path means the model of the run (`model.path`)."""

    minibatch_size: Annotated[int | None, AT_LEAST_1] = None
    """Prompts per optimizer step, over all devices; null uses the whole batch."""

    microbatch_tokens: Annotated[int | None, AT_LEAST_1] = None
    """Maximum number of tokens per forward pass on each device; null: 8,192 on GPUs, 4,096 on CPUs. Lower it if memory
    runs out; results do not change."""

    share_prefixes: bool = True
    """Compute a prefix that sequences of a microbatch have in common only once, such as the prompt of a group. It
    counts once towards `microbatch_tokens`. Results are the same up to rounding."""

    epochs: Annotated[int, AT_LEAST_1] = 1
    """Number of passes over each batch."""

    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory for about a third more time; null: true on GPUs."""

    compile: bool = False
    """Compile the model's layers with `torch.compile` at the first step (single; fsdp without `parallelism.tensor`):
    faster steps on GPUs after a longer start. Results are the same up to rounding."""

    offload_parameters: bool = False
    """Offload the weights to CPU while the role is idle, unless the rollout shares them."""

    offload_optimizer: bool = False
    """Offload the optimizer state to CPU; an optimizer step streams it to the device in buckets."""

    lora: Lora = field(default_factory=Lora)
    """Train low-rank adapters only (single, fsdp)."""

    optimizer: Optimizer = field(default_factory=Optimizer)
    """AdamW and its learning-rate schedule."""

    guards: Guards = field(default_factory=Guards)
    """Checks of the loss, the gradient and the policy's change in every optimizer step, and of replicas."""
