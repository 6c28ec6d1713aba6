"""Tensor parallelism of the Llama family by DTensor: which matrices are divided by rows, which by columns."""

from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from hybridflow.config.parallelism import Parallelism
from hybridflow.errors import EngineError
from hybridflow.models.geometry import read_geometry
from hybridflow.models.names.layouts import layout_problem

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def check_layout(directory: Path, parallelism: Parallelism) -> None:
    """Raises `EngineError` where a model cannot be divided so; any model can be held in shards."""
    if parallelism.tensor == parallelism.sequence == 1:
        return
    problem = layout_problem(
        read_geometry(directory), engine="fsdp", tensor=parallelism.tensor, sequence=parallelism.sequence
    )
    if problem is not None:
        raise EngineError(
            f"The model in {directory} cannot be divided: parallelism.{problem}.",
            remedy="Use sizes that divide the model, or more shards instead (leave parallelism.tensor and"
            " parallelism.sequence out).",
        )


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divides a model's matrices over a mesh, in place: its parameters become DTensors, norms stay whole.

    Each pair of matrices costs one all-reduce forward and one backward; the rest of the model sees plain tensors. Query
    and key norms (Qwen3) see the heads of their rank, so that their gradients are summed over the ranks. The language
    head gives each rank the logits of its part of the vocabulary.
    """
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


def _layer_plan(layer: nn.Module) -> dict[str, ParallelStyle]:
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
    }
    plan |= {name: ColwiseParallel() for name in _COLUMNS}
    plan |= {name: RowwiseParallel() for name in _ROWS}
    norms = [name for name, _ in layer.named_modules() if name in ("self_attn.q_norm", "self_attn.k_norm")]
    return plan | {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in norms}
