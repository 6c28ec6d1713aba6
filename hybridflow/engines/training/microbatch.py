"""From ragged rows to the rectangles a model reads, and back."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.algorithms.logprobs import packed_predicting_positions
from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import microbatches
from hybridflow.batch.ragged import interleaved


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch as rectangles on a device.

    `input_ids` [B, T - 1] is prompt and response, right-padded, without the last column, which predicts nothing: with
    a causal model no real token sees padding, so no attention mask is needed. `predicts` [N] are flat positions in
    [B * (T - 1)] whose output predicts each response token, `places` [N] the flat positions of those tokens in [B, R].
    """

    rows: Tensor
    input_ids: Tensor
    targets: Tensor
    predicts: Tensor
    places: Tensor
    shape: tuple[int, int]
    lengths: Tensor

    def spread(self, flat: Tensor) -> Tensor:
        """Values of the N response tokens as right-padded [B, R], zeros elsewhere."""
        out = flat.new_zeros(self.shape[0] * self.shape[1])
        return out.index_copy(0, self.places, flat).view(self.shape)


def make_microbatches(
    batch: Batch, *, budget_tokens: int, pad_token_id: int, device: torch.device
) -> Iterator[MicroBatch]:
    """The batch's rows as micro-batches of at most `budget_tokens` tokens, padding included."""
    prompts, responses = batch.tokens("prompt_ids"), batch.tokens("response_ids")
    lengths = prompts.lengths + responses.lengths
    for rows in microbatches(lengths, budget_tokens=budget_tokens):
        yield _micro(rows, prompts.select(rows), responses.select(rows), pad_token_id, device)


def columns_of(batch: Batch, micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The micro-batch's part of each column: token columns of the response right-padded with 0, row columns as is."""
    part = batch.select(micro.rows)
    width = micro.shape[1]
    columns = {name: column.to(device) for name, column in part.row_columns.items()}
    for name, ragged in part.token_columns.items():
        if name != "prompt_ids":
            columns[name] = ragged.padded(0, length=width).to(device)
    return columns


def _micro(rows: Tensor, prompts: Ragged, responses: Ragged, pad: int, device: torch.device) -> MicroBatch:
    sequences = interleaved(prompts, responses)
    padded = sequences.padded(pad)[:, :-1]
    counts = responses.lengths
    within = torch.arange(len(responses.values)) - responses.offsets[:-1].repeat_interleave(counts)
    row = torch.arange(len(rows))
    predicts = packed_predicting_positions(row * padded.shape[1], prompts.lengths, counts)
    width = int(counts.max())
    return MicroBatch(
        rows=rows,
        input_ids=padded.to(device),
        targets=responses.values.to(device),
        predicts=predicts.to(device),
        places=(row.repeat_interleave(counts) * width + within).to(device),
        shape=(len(rows), width),
        lengths=counts,
    )
