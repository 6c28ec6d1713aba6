"""Bytes that training systems store per parameter, per token and per logit: our engines, and others as data."""

from dataclasses import dataclass
from functools import cache

from hybridflow.config.training import TrainingEngine
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.mapping.layouts import ModelUse, TrainingLayout

FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class KeptTensors:
    """Tensors of each width that the forward pass of a decoder layer keeps for the backward pass."""

    hidden: int
    query: int
    key: int
    inner: int
    """As wide as the MLP's inner size, or an expert's."""

    routed: int
    """Hidden states per expert of a token."""

    normalized_heads: int = 0
    """Further tensors of queries and of keys if they are normalized per head."""


FUSED = KeptTensors(hidden=5, query=3, key=3, inner=3, routed=5)
"""With norms, rotary positions and the gated product fused (torch.compile, or Megatron-Core's kernels).

Hidden: the results of both norms, attention and MLP, and the sum with the residual. Query: before and after the rotary
positions, and the result of attention; key: the same without a result, and the value. Inner: gate, up and product.
Routed: tokens sorted by expert, padded to the blocks of the grouped product, its result, that in the order of the
tokens, and weighted by the router."""


@cache
def unfused(value_bytes: int) -> KeptTensors:
    """The tensors kept by modules of transformers, which run one operation after another.

    Each norm keeps its input in float32, the normalized input and its result; attention the rotated queries and keys,
    the values and its result; the MLP gate, its SiLU, up and their product; and an expert its tokens and its result.
    """
    float32_copy = FLOAT32 // value_bytes
    return KeptTensors(
        hidden=2 * (float32_copy + 2), query=2, key=2, inner=4, routed=2, normalized_heads=float32_copy + 1
    )


@dataclass(frozen=True, kw_only=True)
class System:
    """Bytes and tensors that a training system stores on a device."""

    weight_bytes: float
    """Per parameter that the device holds."""

    gradient_bytes: float
    """Per trained parameter."""

    optimizer_bytes: float
    """Per trained parameter: moments, and float32 copies of weights in lower precision."""

    kept: KeptTensors
    gathers_layers: bool = False
    """Whether each layer is gathered from shards to be computed (FSDP)."""

    logit_bytes: float
    """Per logit of the LM head at the peak of its backward pass."""

    max_logits: int | None = None
    """Logits that exist at once; None is all of a microbatch."""

    logit_columns: int | None = None
    """Columns of the vocabulary that are computed at once; None is all."""

    offloads_kept: bool = False
    """Whether the inputs of layers that are kept for recomputation are in host memory."""

    offloaded_optimizer: float = 1.0
    """The fraction of the optimizer's state that `offload_optimizer` moves to the host."""

    offloaded_state_bytes: float | None = None
    """Host memory per trained parameter whose optimizer state is offloaded; by default, the state itself."""

    optimizer_buffer_bytes: float = 0.0
    """Device memory for steps of an offloaded optimizer."""

    flat_copy: bool = False
    """Whether an optimizer step copies the device's weights into one buffer."""

    divides_experts: bool = True
    """Whether tensor parallelism divides each expert; otherwise expert parallelism spans tensor-parallel devices."""

    adapts_experts: bool = False
    """Whether LoRA adapts the experts."""

    adapters: int = 1
    """LoRA adapters in memory, of which one is trained."""


def optimizer_bytes(value_bytes: int) -> int:
    """Bytes per parameter of our engines' AdamW: two moments and, of weights in lower precision, a float32 copy."""
    return 2 * FLOAT32 + (FLOAT32 if value_bytes < FLOAT32 else 0)


_OFFLOADED_BUCKETS_BYTES = 3 * 256 << 20
"""An offloaded optimizer has three buckets on the device: one arriving, one being stepped, one leaving."""

_LOGITS_AT_ONCE = 1 << 28
_LOGIT_BYTES = 12
"""A logit in float32, its exponential and its gradient."""


def own_system(use: ModelUse, layout: TrainingLayout) -> System:
    """Our engines, which keep gradients and the optimizer's state in float32, and weights in the model's dtype."""
    traits = TRAINING_ENGINES[layout.engine]
    return System(
        weight_bytes=use.value_bytes,
        gradient_bytes=FLOAT32,
        optimizer_bytes=optimizer_bytes(use.value_bytes),
        kept=unfused(use.value_bytes),
        gathers_layers=traits.shards_over_data and layout.num_devices > layout.replicas,
        logit_bytes=_LOGIT_BYTES,
        max_logits=_LOGITS_AT_ONCE,
        optimizer_buffer_bytes=_OFFLOADED_BUCKETS_BYTES,
        flat_copy=layout.engine is TrainingEngine.megatron and layout.distributed_optimizer,
    )
