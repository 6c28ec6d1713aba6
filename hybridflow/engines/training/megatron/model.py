"""A rank's part of a model: one chunk of consecutive layers, or several with virtual pipeline stages."""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from hybridflow.algorithms.vocabulary_parallel import vocabulary_parallel_outputs
from hybridflow.engines.training.megatron.architecture import RmsNorm, decoder_spec
from hybridflow.engines.training.megatron.attention import PackedTokens
from hybridflow.engines.training.megatron.process_groups import tensor_group
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.outputs import chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.geometry import ModelGeometry
from hybridflow.models.names.megatron import parts_of
from hybridflow.models.names.parts import Part, whole_part
from hybridflow.models.names.rules import Place, padded_vocabulary, stage_layers


class Chunk(GPTModel):
    """Layers of Megatron-Core's GPT model. The first chunk has the embedding, and the last the norm and the head.

    A value model's head is a float32 linear layer, replicated on every tensor-parallel rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        geometry: ModelGeometry,
        layers: Sequence[int],
        *,
        is_value: bool,
        padding_token: int | None,
        virtual_stage: int | None,
    ) -> None:
        is_last = layers[-1] == geometry.layers - 1
        super().__init__(
            config,
            decoder_spec(geometry, len(layers)),  # pyright: ignore[reportArgumentType]
            vocab_size=padded_vocabulary(geometry, config.tensor_model_parallel_size),
            max_sequence_length=geometry.max_positions,
            pre_process=layers[0] == 0,
            post_process=is_last and not is_value,
            share_embeddings_and_output_weights=geometry.tied and not is_value,
            position_embedding_type="none",
            vp_stage=virtual_stage,
        )
        self._vocabulary = geometry.vocab
        self._padding_token = padding_token
        self._group = tensor_group()
        self.bound: set[nn.Parameter] = set()
        """Parameters that are views of a rollout engine's memory."""
        self.score = None
        if is_last and is_value:
            self.decoder.final_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.score = nn.Linear(config.hidden_size, 1, dtype=torch.float32)
        place = this_place()
        self.parts = {name: part_of(name, geometry, place, layers) for name, _ in self.named_parameters()}
        for name, parameter in self.named_parameters():
            _mark_divided(parameter, self.parts[name])
            # Padding rows get no gradient, but their values are multiplied, and uninitialized memory can hold NaN.
            parameter.data[self.parts[name].layout.local_shape[0] :] = 0.0

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, micro: MicroBatch, tokens: PackedTokens
    ) -> Float[Tensor, "N 1 H"]:
        """Hidden states after these layers; with sequence parallelism, of this rank's share of the N tokens.

        Chunks other than the first take their input from `set_input_tensor`.
        """
        embedded = self._embedded(micro.input_ids) if self.pre_process else None
        return self.decoder(hidden_states=embedded, attention_mask=None, packed_seq_params=tokens)

    def _embedded(self, ids: Int[Tensor, " N"]) -> Float[Tensor, "N 1 H"]:
        """The tokens' embeddings; the padding token's gets no gradient, like `padding_idx` in transformers.

        There its row is 0, so the first norm would multiply its gradient by 1 / sqrt(epsilon).
        """
        embedded = self.embedding(input_ids=ids[None], position_ids=None)
        if self._padding_token is None:
            return embedded
        is_padding = ids == self._padding_token
        if self.config.sequence_parallel:
            is_padding = is_padding.chunk(self._group.size())[self._group.rank()]
        return torch.where(is_padding[:, None, None], embedded.detach(), embedded)

    def outputs(
        self, hidden: Float[Tensor, "N 1 H"], micro: MicroBatch, names: tuple[str, ...], temperature: float
    ) -> dict[str, Float[Tensor, " M"]]:
        """The head's named outputs for the M response tokens, the same on every tensor-parallel rank."""
        if self.score is not None:
            assert names == ("values",), f"a value model was asked for {names}"
            states = self._whole(hidden, is_divided_next=False)[micro.predicts]
            return {"values": self.score(states.float()).squeeze(-1)}
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None, "the last chunk has a head"
        rows, group = weight.shape[0], self._group

        def of_chunk(states: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return vocabulary_parallel_outputs(
                F.linear(states, weight),
                targets,
                names,
                temperature=temperature,
                first_column=group.rank() * rows,
                vocabulary=self._vocabulary,
                group=group if group.size() > 1 else None,
            )

        states = self._whole(hidden, is_divided_next=True)[micro.predicts]
        chunk = chunk_tokens_of(rows, states.device)
        outputs = recomputed_in_chunks(of_chunk, states, micro.targets, chunk_tokens=chunk)
        return dict(zip(names, outputs, strict=True))

    def _whole(self, hidden: Tensor, *, is_divided_next: bool) -> Float[Tensor, "N H"]:
        """The states of all tokens; with `is_divided_next`, their gradients are summed over tensor-parallel ranks."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=is_divided_next)
        elif is_divided_next:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        return hidden[:, 0]


def make_chunks(
    config: TransformerConfig, geometry: ModelGeometry, *, is_value: bool, padding_token: int | None
) -> list[Chunk]:
    """This rank's chunks, with uninitialized weights. The layout's process groups must be active."""
    virtual = config.virtual_pipeline_model_parallel_size or 1
    rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = stage_layers(geometry.layers, rank, config.pipeline_model_parallel_size, virtual)
    return [
        Chunk(
            config,
            geometry,
            layers,
            is_value=is_value,
            padding_token=padding_token,
            virtual_stage=stage if virtual > 1 else None,
        )
        for stage, layers in enumerate(stages)
    ]


_STACKED = re.compile(r"(?P<module>.+)\.(?P<kind>weight|bias)(?:e?s)\.(?P<index>\d+)")


def part_of(parameter_name: str, geometry: ModelGeometry, place: Place, layers: Sequence[int]) -> Part:
    """The weight in a parameter, without the rows that pad the vocabulary.

    Projections that Megatron-Core stacks in one parameter are `weights.0`, `weights.1`, ... of a `StackedLinear`.
    """
    found = _STACKED.fullmatch(parameter_name)
    if found is None:
        (part,) = parts_of(parameter_name, geometry, place, layers)
        return part
    part = parts_of(f"{found['module']}.{found['kind']}", geometry, place, layers)[int(found["index"])]
    return whole_part(part.name, part.layout)


def this_place() -> Place:
    """This rank's tensor- and expert-parallel coordinates."""
    return Place(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def _mark_divided(parameter: nn.Parameter, part: Part) -> None:
    """Marks a tensor-parallel parameter, so that the gradient norm counts all its shards, and replicated ones once.

    Megatron-Core sets these marks when it initializes weights, which it does not do here.
    """
    divided = [dim for dim, (low, high) in enumerate(part.layout.box) if high - low < part.layout.shape[dim]]
    if divided and parallel_state.get_tensor_model_parallel_world_size() > 1:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=divided[0], stride=1)
