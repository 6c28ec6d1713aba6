"""Tensor parallelism of the Llama family with DTensor: which matrices are sharded by rows, and which by columns."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shards a model's matrices over a mesh, in place: its parameters become DTensors, and norms stay whole.

    Each pair of matrices costs one all-reduce forward and one backward; the rest of the model sees plain tensors. Query
    and key norms (Qwen3) see only their rank's heads, so their gradients are summed over the ranks. The language head
    gives each rank the logits of its part of the vocabulary.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    decoder = model.get_decoder()
    for layer in decoder.get_submodule("layers").children():
        parallelize_module(layer, mesh, _layer_plan(layer))
    parallelize_module(decoder, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    head, embedding = model.get_output_embeddings(), decoder.get_input_embeddings()
    if head is not None:
        is_tied = model.config.get_text_config().tie_word_embeddings
        if is_tied:
            head.weight = embedding.weight
        parallelize_module(head, mesh, ColwiseParallel())
        if is_tied:
            head.weight = embedding.weight
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)  # SequenceParallel makes all parameters trainable


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }
    adapted = {name.removesuffix(".base_layer") for name, _ in layer.named_modules() if name.endswith(".base_layer")}
    for name in _COLUMNS:
        plan |= _adapted_columns(name) if name in adapted else {name: ColwiseParallel()}
    for name in _ROWS:
        plan |= _adapted_rows(name) if name in adapted else {name: RowwiseParallel()}
    norms = [name for name, _ in layer.named_modules() if name in ("self_attn.q_norm", "self_attn.k_norm")]
    return plan | {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in norms}


def _adapted_columns(name: str) -> dict[str, ParallelStyle]:
    """A column-parallel matrix with LoRA: B is sharded in the same way, and A is whole on every rank."""
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.default": _Replicated(),
        f"{name}.lora_B.default": ColwiseParallel(),
    }


def _adapted_rows(name: str) -> dict[str, ParallelStyle]:
    """A row-parallel matrix with LoRA: A is sharded in the same way, and B is whole on every rank."""
    return {f"{name}.base_layer": RowwiseParallel(), f"{name}.lora_A.default": RowwiseParallel()}


class _Replicated(ParallelStyle):
    """Parameters and inputs that are whole on every rank; gradients are summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)
