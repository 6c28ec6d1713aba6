"""What a model says of response tokens: log-probabilities and entropy, or values."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridflow.algorithms.logprobs import logprobs_and_entropy
from hybridflow.engines.training.interface import TokenOutputs
from hybridflow.engines.training.microbatch import MicroBatch
from hybridflow.models.heads import ValueModel, hidden_states, logits_of

ModelT = TypeVar("ModelT", bound=nn.Module)
Predictor = Callable[[ModelT, MicroBatch, float], TokenOutputs]
"""From a model, a micro-batch and a temperature to outputs, padded [B, R]."""


def language_outputs(model: PreTrainedModel, micro: MicroBatch, temperature: float) -> TokenOutputs:
    """Log-probability and entropy of softmax(logits / temperature); logits are made for response tokens only."""
    logits = logits_of(model, _predicting_states(model, micro))
    logprobs, entropy = logprobs_and_entropy(logits, micro.targets, temperature=temperature)
    return TokenOutputs(micro.spread(logprobs), micro.spread(entropy), logprobs.new_empty(0))


def value_outputs(model: ValueModel, micro: MicroBatch, temperature: float) -> TokenOutputs:
    """The value of the state before each response token; the temperature has no say."""
    values = model.values(_predicting_states(model, micro))
    return TokenOutputs(values.new_empty(0), values.new_empty(0), micro.spread(values))


def _predicting_states(model: PreTrainedModel | ValueModel, micro: MicroBatch) -> Tensor:
    positions = torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device)[None]
    hidden = hidden_states(model, micro.input_ids, positions)
    return hidden.flatten(0, 1)[micro.predicts]
