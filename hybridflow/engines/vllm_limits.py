"""Models that vLLM cannot run on a device, determined without importing it."""

from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.json_text import read_json_object
from hybridflow.errors import ConfigError

CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's CPU attention (`CPUAttentionBackend.get_supported_head_sizes`), and 48, which works too
although it is not listed."""

CUDA_HEAD_SIZE_STEP = 8
CUDA_LARGEST_HEAD_SIZE = 256
"""FlashAttention supports multiples of 8 up to 256."""


def check_limits(directory: Path, device: str, pipeline: int) -> None:
    """Raises `ConfigError` if vLLM cannot run the model in a directory on a device ("cpu", "cuda"), or in stages."""
    if reason := unsupported_reason(read_json_object(directory / "config.json"), device):
        raise ConfigError(f"rollout.engine=vllm: {reason}", remedy="Use rollout.engine=transformers for this model.")
    if pipeline > 1 and device == "cpu":
        raise ConfigError(
            f"rollout.parallelism.pipeline={pipeline}: vLLM does not support pipeline parallelism on a CPU.",
            remedy="Use rollout.parallelism.pipeline=1, and rollout.parallelism.tensor to shard the model.",
        )


def unsupported_reason(model_config: Mapping[str, object], device: str) -> str | None:
    """Why vLLM cannot run the model that `config.json` describes on a device ("cpu", "cuda"); None if it can."""
    text = model_config.get("text_config")
    config = {**model_config, **text} if isinstance(text, Mapping) else model_config
    size = _head_size(config)
    if size is None:
        return "the model's config.json gives neither head_dim nor hidden_size and num_attention_heads."
    if device == "cpu" and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        return f"the model's attention heads have size {size}; vLLM's CPU kernels support {sizes}."
    if device != "cpu" and (size % CUDA_HEAD_SIZE_STEP or size > CUDA_LARGEST_HEAD_SIZE):
        return f"the model's attention heads have size {size}; vLLM supports multiples of 8 up to 256."
    return None


def _head_size(config: Mapping[str, object]) -> int | None:
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(head_dim, int):
        return head_dim
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
