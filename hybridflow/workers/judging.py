"""How a value model is asked for a score: the value once a whole sequence is read, or after each of its tokens.

Training engines give the value before each response token, and show a model all tokens but a sequence's last. So a
dummy token is put behind: the value before it is the one that is wanted, and no model sees it.
"""

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.batch.ragged import interleaved
from hybridflow.engines.training.interface import TrainEngine


def read_whole(batch: Batch) -> Batch:
    """The batch as an engine gives one value per row for it: what it asks of the model is a dummy behind all tokens."""
    sequences = interleaved(batch.tokens("prompt_ids"), batch.tokens("response_ids"))
    return Batch.of(rows=batch.row_columns, tokens=_asked(sequences), meta=batch.meta)


def values_at_end(engine: TrainEngine, sequences: Ragged) -> Tensor:
    """The value of each sequence [B], all of it read; float32 on the CPU."""
    return _values(engine, Batch.of(tokens=_asked(sequences))).values


def values_after_tokens(engine: TrainEngine, batch: Batch) -> Ragged:
    """The value after each response token, in the place of that token."""
    responses = batch.tokens("response_ids")
    longer = interleaved(responses, _dummies(len(responses)))
    asked = Batch.of(tokens={"prompt_ids": batch.tokens("prompt_ids"), "response_ids": longer})
    values = _values(engine, asked)
    after = torch.ones(len(values.values), dtype=torch.bool)
    after[values.offsets[:-1]] = False  # the value before the first token
    return responses.like(values.values[after])


def _values(engine: TrainEngine, batch: Batch) -> Ragged:
    """A value model's only output; there are no logits for a temperature to divide."""
    return engine.forward(batch, ("values",), temperature=1.0).tokens("values")


def _asked(sequences: Ragged) -> dict[str, Ragged]:
    return {"prompt_ids": sequences, "response_ids": _dummies(len(sequences))}


def _dummies(rows: int) -> Ragged:
    return Ragged.from_lengths(torch.zeros(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))
