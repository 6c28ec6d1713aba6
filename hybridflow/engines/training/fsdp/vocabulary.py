"""A language model whose head is divided: each rank makes the logits of its part of the vocabulary, and of no other."""

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridflow.algorithms.vocabulary_parallel import vocabulary_parallel_outputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.recomputed import chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.heads import logits_of, packed_hidden_states


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
