"""How responses are generated."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from hybridflow.config.parallelism import RolloutParallelism
from hybridflow.config.ranges import ABOVE_0_OR_NULL, AT_LEAST_0, AT_LEAST_1, SHARE, Range, number
from hybridflow.config.section import Section

DEFAULT_SEQUENCES, DEFAULT_SEQUENCES_ON_GPUS = 256, 1024
"""`rollout.max_sequences` where it is null; the second for vLLM on a GPU."""

_TEMPERATURE = number(
    "of 0.01 or more, or 0",
    lambda v: v == 0 or v >= 0.01,
    " for the most probable token: logits divided by less lose their differences to overflow or leave one token",
)
_TRANSFER_SECONDS = Range(lambda v: v > 0, "above 0", "is too small", "Use 300.")


class RolloutKind(Enum):
    """The machine that generates."""

    transformers = "transformers"
    vllm = "vllm"


class TransferKind(Enum):
    """How weights get from training to the rollout."""

    auto = "auto"
    local = "local"
    gather = "gather"
    send_recv = "send_recv"
    shared_memory = "shared_memory"
    cuda_ipc = "cuda_ipc"


@dataclass
class Transfer(Section):
    """How trained weights become those of the rollout."""

    executor: TransferKind = TransferKind.auto
    """auto: nothing moves where both share memory, gather inside the groups that hold one model, else send_recv."""

    bucket_mb: Annotated[int, AT_LEAST_1] = 256
    """Weights under way at once on each device, in two halves."""

    timeout_seconds: Annotated[float, _TRANSFER_SECONDS] = 300.0
    """How long a whole transfer may take; past it, or at once when a rank dies, it fails and names who is missing."""

    verify: bool = True
    """Compare checksums of both sides: of all weights where the model is small, else of a few, other ones each time."""


@dataclass
class Sampling(Section):
    """How the next token is drawn."""

    temperature: Annotated[float, _TEMPERATURE] = 1.0
    """Divides the logits; 0 always takes the most probable token."""

    top_p: Annotated[float, SHARE] = 1.0
    """Draw from the smallest set of tokens with at least this probability; 1 draws from all."""

    top_k: Annotated[int, AT_LEAST_0] = 0
    """Draw from this many most probable tokens; 0 draws from all."""

    ignore_eos: bool = False
    """Go on to the length limit whatever is drawn; for benchmarks."""

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be drawn, so that log-probabilities are renormalised over the others."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass
class Vllm(Section):
    """Settings of the vLLM engine alone."""

    kv_cache_mb: Annotated[int | None, AT_LEAST_1] = None
    """Memory for keys and values; null means 256 MB on a CPU, and what `gpu_memory_fraction` leaves on a GPU."""

    gpu_memory_fraction: Annotated[float, SHARE] = 0.4
    """Share of a GPU's memory for vLLM's weights, working memory and cache, whichever role starts first."""

    enforce_eager: bool | None = None
    """Skip graph capture; null means yes on a CPU, no on a GPU."""


@dataclass
class Rollout(Section):
    """The rollout role."""

    engine: RolloutKind | None = None
    """transformers runs everywhere; vllm needs an extra and is faster on larger models. null: vllm on GPUs where it is
    installed, and wherever `parallelism` divides the model; else transformers."""

    parallelism: RolloutParallelism = field(default_factory=RolloutParallelism)
    """How the generating model is spread over devices."""

    samples_per_prompt: Annotated[int, AT_LEAST_1] = 1
    """Responses per prompt (GRPO's group size)."""

    sampling: Sampling = field(default_factory=Sampling)
    """How training responses are drawn."""

    eval_sampling: Sampling = field(default_factory=Sampling)
    """How evaluation responses are drawn."""

    eval_samples_per_prompt: Annotated[int, AT_LEAST_1] = 1
    """Responses per prompt in evaluation; their mean is reported, and with several also the best (pass@N)."""

    max_sequences: Annotated[int | None, AT_LEAST_1] = None
    """Responses generated at once on one device; the rest wait. null: 1024 for vllm on a GPU, else 256."""

    sleep: bool | None = None
    """Give back the memory of its cache and, on CPUs, of weights that training does not share, while other roles
    work; null: true on GPUs. Waking costs a transfer of weights."""

    max_logprob_difference: Annotated[float | None, ABOVE_0_OR_NULL] = None
    """The first step stops when the log-probabilities of rollout and training differ by more on any token; null: 1e-3
    in float32, 0.5 in bfloat16. Divided by the temperature where that is below 1: differences grow with its inverse."""

    transfer: Transfer = field(default_factory=Transfer)
    """How trained weights become those of the rollout."""

    vllm: Vllm = field(default_factory=Vllm)
    """Settings of the vLLM engine alone."""
