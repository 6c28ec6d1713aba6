"""Settings of the rollout."""

from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Annotated

from hybridflow.config.placement import RolloutParallelism
from hybridflow.config.ranges import ABOVE_0_OR_NULL, AT_LEAST_0, AT_LEAST_1, SHARE, Range, number
from hybridflow.config.section import Section

DEFAULT_SEQUENCES, DEFAULT_SEQUENCES_ON_GPUS = 256, 1024
"""Defaults of `rollout.max_sequences`; the second is for vLLM on a GPU."""

_TEMPERATURE = number(
    "of 0.01 or more, or 0",
    lambda v: v == 0 or v >= 0.01,
    " for the most probable token: smaller values overflow or leave a single token",
)
_TRANSFER_SECONDS = Range(lambda v: v > 0, "above 0", "is too small", "Use 300.")


class RolloutKind(StrEnum):
    """The rollout engines that come with the package."""

    transformers = "transformers"
    vllm = "vllm"


class TransferKind(Enum):
    """How weights are moved from training to the rollout."""

    auto = "auto"
    local = "local"
    gather = "gather"
    send_recv = "send_recv"
    shared_memory = "shared_memory"
    cuda_ipc = "cuda_ipc"


@dataclass
class Transfer(Section):
    """Transfer of the trained weights to the rollout."""

    executor: TransferKind = TransferKind.auto
    """auto: the first of local (no rank receives weights), gather (nested layouts) and send_recv (any layouts) that can
    execute the plan."""

    bucket_mb: Annotated[int, AT_LEAST_1] = 256
    """Size of the transfer buffer per device, split into two halves."""

    timeout_seconds: Annotated[float, _TRANSFER_SECONDS] = 300.0
    """Time limit of a transfer. When it is exceeded, or as soon as a rank dies, the error names the missing ranks."""

    verify: bool = True
    """Compare checksums of source and destination: for all weights of small models, otherwise for a subset that changes
    with each transfer."""

    overlap: bool = False
    """With partial rollouts and a rollout in a pool of its own: it generates while new weights arrive in a copy, and
    pauses only to switch to them. Takes memory for a second copy of the rollout's weights."""


@dataclass
class Sampling(Section):
    """How tokens are sampled."""

    temperature: Annotated[float, _TEMPERATURE] = 1.0
    """Sampling temperature; 0 is greedy."""

    top_p: Annotated[float, SHARE] = 1.0
    """Sample from the smallest set of tokens whose total probability is at least this; 1 samples from all."""

    top_k: Annotated[int, AT_LEAST_0] = 0
    """Sample from the k most probable tokens; 0 samples from all."""

    ignore_eos: bool = False
    """Continue to the length limit after an end-of-sequence token; for benchmarks."""

    stop: list[str] = field(default_factory=list)
    """Stop strings: a response ends with the token that completes one of them, and keeps that token. Evaluation uses
    those of `sampling` if `eval_sampling` has none."""

    stop_token_ids: list[Annotated[int, AT_LEAST_0]] = field(default_factory=list)
    """Further tokens that end a response, which keeps them. If `eval_sampling` has none, evaluation uses those of
    `sampling`."""

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens cannot be sampled, so that log-probabilities are renormalized over the others."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass
class Vllm(Section):
    """Settings of the vLLM engine."""

    kv_cache_mb: Annotated[int | None, AT_LEAST_1] = None
    """Memory of the KV cache; null means 256 MB on a CPU, and what `gpu_memory_fraction` leaves on a GPU."""

    gpu_memory_fraction: Annotated[float, SHARE] = 0.4
    """Fraction of GPU memory for vLLM's weights, working memory and cache, regardless of which role starts first."""

    enforce_eager: bool | None = None
    """Skip CUDA graph capture; null means true on a CPU, false on a GPU."""


@dataclass
class Rollout(Section):
    """The rollout role."""

    engine: str | None = None
    """transformers runs everywhere; vllm needs an extra and is faster on larger models; `path/file.py:Engine` is a
    class of your own. null: vllm on GPUs if it is installed, and whenever `parallelism` divides the model; otherwise
    transformers."""

    parallelism: RolloutParallelism = field(default_factory=RolloutParallelism)
    """How the generating model is parallelized over devices."""

    samples_per_prompt: Annotated[int, AT_LEAST_1] = 1
    """Responses per prompt (GRPO's group size)."""

    sampling: Sampling = field(default_factory=Sampling)
    """How training responses are sampled."""

    eval_sampling: Sampling = field(default_factory=Sampling)
    """How evaluation responses are sampled."""

    eval_samples_per_prompt: Annotated[int, AT_LEAST_1] = 1
    """Responses per prompt in evaluation; the mean is reported, and with several also the best (pass@N)."""

    max_sequences: Annotated[int | None, AT_LEAST_1] = None
    """Maximum number of responses generated concurrently per device. null: 1024 for vllm on a GPU, else 256."""

    sleep: bool | None = None
    """While other roles run, free the KV cache and, on CPUs, weights that are not shared with training; null: true on
    GPUs. On CPUs, waking up takes a weight transfer."""

    max_logprob_difference: Annotated[float | None, ABOVE_0_OR_NULL] = None
    """Stop in the first step if the log-probabilities of rollout and training differ by more than this on any token.
    null: 1e-3 in float32, 0.5 in bfloat16, divided by the temperature if that is below 1."""

    transfer: Transfer = field(default_factory=Transfer)
    """Transfer of the trained weights to the rollout."""

    vllm: Vllm = field(default_factory=Vllm)
    """Settings of the vLLM engine."""

    def sampling_for(self, purpose: str) -> Sampling:
        """How responses are sampled for a purpose: train, eval or greedy."""
        train, evaluation = self.sampling, self.eval_sampling
        ends = {
            "stop": evaluation.stop or train.stop,
            "stop_token_ids": evaluation.stop_token_ids or train.stop_token_ids,
        }
        greedy = Sampling(temperature=0.0, stop=train.stop, stop_token_ids=train.stop_token_ids)
        return {"train": train, "eval": replace(evaluation, **ends), "greedy": greedy}[purpose]
