"""vLLM's parameters under their canonical names: fused tensors are cut into views of their rows."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from hybridflow.errors import EngineError
from hybridflow.parallel.layout import WeightShard

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Which projections vLLM keeps, one below the other, in one tensor (Llama, Mistral, Qwen2, Qwen3)."""


def slots_of(model: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, WeightShard]:
    """A writable view for each canonical weight of the given shape; raises unless they cover `model` exactly.

    A vocabulary is padded at the end in vLLM; those rows are nobody's.
    """
    slots: dict[str, WeightShard] = {}
    for name, parameter in model.named_parameters():
        slots |= {slot.name: slot for slot in _parts(name, parameter.data, shapes)}
    if missing := sorted(set(shapes) - set(slots)):
        raise _misfit(f"vLLM has no place for {len(missing)} weights, first '{missing[0]}'")
    return slots


def _parts(name: str, tensor: Tensor, shapes: Mapping[str, torch.Size]) -> Iterator[WeightShard]:
    start = 0
    for part in _canonical_names(name):
        if part not in shapes or shapes[part][1:] != tensor.shape[1:]:
            raise _misfit(f"vLLM's '{name}' of shape {tuple(tensor.shape)} does not hold '{part}'")
        stop = start + shapes[part][0]
        yield WeightShard.full(part, tensor[start:stop])
        start = stop
    if start != len(tensor) and not (start < len(tensor) and _is_padded(name)):
        raise _misfit(f"vLLM's '{name}' has {len(tensor)} rows, its weights have {start}")


def _canonical_names(name: str) -> list[str]:
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    return [f"{parent}.{part}.{kind}" for part in FUSED[module]] if module in FUSED else [name]


def _is_padded(name: str) -> bool:
    return name.endswith(("embed_tokens.weight", "lm_head.weight"))


def _misfit(found: str) -> EngineError:
    return EngineError(
        f"{found}: its weights cannot be updated in place.", remedy="Set rollout.engine=transformers for this model."
    )
