"""Outputs of a model for response tokens: log-probabilities and entropy, or values."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hybridflow.algorithms.logprobs import language_outputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.models.heads import ValueModel, logits_of, packed_hidden_states

CHUNK_ELEMENTS_CPU = 1 << 26
CHUNK_ELEMENTS_ACCELERATOR = 1 << 28
"""Logits held at a time: 256 MiB in float32 on a CPU, 512 MiB in bfloat16 on an accelerator, and twice that in the
backward pass. Large enough that the matrix products of the head run at full speed."""

TokenModel = nn.Module
"""Maps a microbatch, names of outputs and a temperature to those outputs for its M response tokens."""


class LanguageOutputs(nn.Module):
    """A causal language model with outputs for response tokens only: one root module, whose call does everything.

        outputs = LanguageOutputs(model)(micro, ("logprobs", "entropy"), 1.0)  # {"logprobs": [M], "entropy": [M]}

    Logits are held for `chunk_tokens` response tokens at a time; None chooses a number that fits the device. With a
    head that is divided over ranks, each rank has `columns` logits per token, and `outputs_of` combines them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_tokens: int | None = None,
        columns: int | None = None,
        outputs_of: Callable[..., tuple[Tensor, ...]] = language_outputs,
    ) -> None:
        super().__init__()
        self.model = model
        self._outputs_of = outputs_of
        self._columns = columns or model.config.get_text_config().vocab_size
        self._chunk_tokens = chunk_tokens

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """The named outputs [M] of `language_outputs`."""
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing).index_select(0, micro.predicts)

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return self._outputs_of(logits_of(self.model, hidden), targets, names, temperature=temperature)

        chunk = self._chunk_tokens or chunk_tokens_of(self._columns, hidden.device)
        outputs = recomputed_in_chunks(of_chunk, hidden, micro.targets, chunk_tokens=chunk)
        return dict(zip(names, outputs, strict=True))


class ValueOutputs(nn.Module):
    """A value model that gives the value of the state before each response token."""

    def __init__(self, model: ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """`values` [M], float32, its only output; the temperature has no effect."""
        assert names == ("values",), f"a value model was asked for {names}"
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing)
        return {"values": self.model.values(hidden.index_select(0, micro.predicts))}


def recomputed_in_chunks(
    function: Callable[..., tuple[Tensor, ...]], *per_token: Float[Tensor, "M ..."], chunk_tokens: int
) -> tuple[Tensor, ...]:
    """`function(*per_token)`, which returns one number per token and output, computed `chunk_tokens` tokens at a time.

    Intermediate results are dropped and recomputed in the backward pass (arXiv:1604.06174). If one chunk is enough, or
    no gradient is needed, nothing is recomputed.
    """
    if per_token[0].shape[0] <= chunk_tokens:
        return function(*per_token)
    chunks = zip(*(column.split(chunk_tokens) for column in per_token), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        parts = [function(*chunk) for chunk in chunks]
    return tuple(torch.cat(outputs) for outputs in zip(*parts, strict=True))


def chunk_tokens_of(columns: int, device: torch.device) -> int:
    """Tokens per chunk, if each token has `columns` logits."""
    elements = CHUNK_ELEMENTS_CPU if device.type == "cpu" else CHUNK_ELEMENTS_ACCELERATOR
    return max(1, elements // columns)
