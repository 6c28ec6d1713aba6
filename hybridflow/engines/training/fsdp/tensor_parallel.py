"""Tensor parallelism of the Llama family by DTensor: which matrices are divided by rows, which by columns."""

import torch.distributed as dist
from torch import Tensor, nn
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

from hybridflow.algorithms.vocabulary_parallel import vocabulary_parallel_outputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.outputs import chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.heads import logits_of, packed_hidden_states

_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def divide_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divides a model's matrices over a mesh, in place: its parameters become DTensors, norms stay whole.

    Each pair of matrices costs one all-reduce forward and one backward; the rest of the model sees plain tensors. Query
    and key norms (Qwen3) see the heads of their rank, so that their gradients are summed over the ranks. The language
    head gives each rank the logits of its part of the vocabulary.
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
        parameter.requires_grad_(name not in frozen)  # SequenceParallel makes trained parameters of all


class DividedLanguageOutputs(nn.Module):
    """`LanguageOutputs` of a model whose matrices are divided over a group: the same numbers on all its ranks."""

    def __init__(self, model: PreTrainedModel, *, first_column: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.model = model
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._first_column = first_column
        self._group = group

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """The named outputs [M] of `language_outputs`."""
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing).index_select(0, micro.predicts)

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return vocabulary_parallel_outputs(
                logits_of(self.model, hidden),
                targets,
                names,
                temperature=temperature,
                first_column=self._first_column,
                vocabulary=self._vocabulary,
                group=self._group,
            )

        chunk = chunk_tokens_of(self._vocabulary // self._group.size(), hidden.device)
        outputs = recomputed_in_chunks(of_chunk, hidden, micro.targets, chunk_tokens=chunk)
        return dict(zip(names, outputs, strict=True))


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
    """A matrix divided by its output, with a low-rank addition: B is divided alike, and A is whole on every rank."""
    return {
        f"{name}.base_layer": ColwiseParallel(),
        f"{name}.lora_A.default": _Replicated(),
        f"{name}.lora_B.default": ColwiseParallel(),
    }


def _adapted_rows(name: str) -> dict[str, ParallelStyle]:
    """A matrix divided by its input: A is divided alike, and B, after the sum over the ranks, whole on every rank."""
    return {f"{name}.base_layer": RowwiseParallel(), f"{name}.lora_A.default": RowwiseParallel()}


class _Replicated(ParallelStyle):
    """Parameters that are whole on every rank, for inputs that every rank has whole; gradients add up over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)
