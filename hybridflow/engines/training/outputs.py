"""What a model says of response tokens: log-probabilities and entropy, or values."""

from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridflow.algorithms.logprobs import logprobs_and_entropy, sum_pi_squared
from hybridflow.engines.training.interface import TokenOutputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.engines.training.recomputed import chunk_tokens_of, recomputed_in_chunks
from hybridflow.models.heads import ValueModel, logits_of, packed_hidden_states

LANGUAGE_OUTPUTS = ("logprobs", "entropy", "sum_pi_squared")
"""What a language model says of a token; the last where a micro-batch asks for it."""


class LanguageOutputs(nn.Module):
    """A causal language model asked for response tokens alone: one root module, whose call does everything.

    outputs = LanguageOutputs(model)(micro, temperature)      # {"logprobs": [M], "entropy": [M]}

    Logits are held for `chunk_tokens` response tokens at a time (by default as many as an engine can afford).
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens

    def forward(self, micro: MicroBatch, temperature: float) -> dict[str, Tensor]:
        """Log-probability and entropy of softmax(logits / temperature), and its sum of squares where asked; float32."""
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing).index_select(0, micro.predicts)

        def of_chunk(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            logits = logits_of(self.model, hidden)
            outputs = logprobs_and_entropy(logits, targets, temperature=temperature)
            return (*outputs, sum_pi_squared(logits, temperature=temperature)) if micro.with_squares else outputs

        columns = self.model.config.get_text_config().vocab_size
        chunk = self._chunk_tokens or chunk_tokens_of(columns, hidden.device)
        outputs = recomputed_in_chunks(of_chunk, hidden, micro.targets, chunk_tokens=chunk)
        return dict(zip(LANGUAGE_OUTPUTS, outputs, strict=False))


class ValueOutputs(nn.Module):
    """A value model asked for the value of the state before each response token."""

    def __init__(self, model: ValueModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro: MicroBatch, temperature: float) -> dict[str, Tensor]:
        """`values` [M], float32; the temperature has no say."""
        hidden = packed_hidden_states(self.model, micro.input_ids, micro.packing)
        return {"values": self.model.values(hidden.index_select(0, micro.predicts))}


TokenModel = nn.Module
"""From a micro-batch and a temperature to what the model says of its M response tokens."""


def token_outputs(micro: MicroBatch, outputs: dict[str, Tensor]) -> TokenOutputs:
    """The same for loss functions: right-padded [B, R]."""
    empty = next(iter(outputs.values())).new_empty(0)
    padded = {name: micro.spread(flat) for name, flat in outputs.items()}
    return TokenOutputs(*(padded.get(name, empty) for name in ("logprobs", "entropy", "values")))
