"""What a model says of response tokens: log-probabilities and entropy, or values."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridflow.algorithms.logprobs import language_outputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.recomputed import chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.heads import ValueModel, logits_of, packed_hidden_states


class LanguageOutputs(nn.Module):
    """A causal language model asked for response tokens alone: one root module, whose call does everything.

    outputs = LanguageOutputs(model)(micro, ("logprobs", "entropy"), 1.0)      # {"logprobs": [M], "entropy": [M]}

    Logits are held for `chunk_tokens` response tokens at a time (by default as many as an engine can afford).
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """The named outputs [M] of `language_outputs`."""
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing).index_select(0, micro.predicts)

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            return language_outputs(logits_of(self.model, hidden), targets, names, temperature=temperature)

        columns = self.model.config.get_text_config().vocab_size
        chunk = self._chunk_tokens or chunk_tokens_of(columns, hidden.device)
        outputs = recomputed_in_chunks(of_chunk, hidden, micro.targets, chunk_tokens=chunk)
        return dict(zip(names, outputs, strict=True))


class ValueOutputs(nn.Module):
    """A value model asked for the value of the state before each response token."""

    def __init__(self, model: ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro: MicroBatch, names: tuple[str, ...], temperature: float) -> dict[str, Tensor]:
        """`values` [M], float32, its only output; the temperature has no say."""
        assert names == ("values",), f"a value model was asked for {names}"
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing)
        return {"values": self.model.values(hidden.index_select(0, micro.predicts))}


TokenModel = nn.Module
"""From a micro-batch, names of outputs and a temperature to those outputs of its M response tokens."""
