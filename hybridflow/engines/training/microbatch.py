"""Turns ragged rows into the model's input: concatenated sequences without padding."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms.logprobs import packed_predicting_positions
from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import ROWS_TOGETHER, microbatches
from hybridflow.batch.ragged import interleaved, offsets_of
from hybridflow.models.packing import Packing


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, end to end on a device.

    `input_ids` [N] are prompts and responses, each sequence without its last token, which predicts nothing, and
    `packing` says where each begins; a dummy sequence at the end may fill up N. `predicts` [M] are the positions in
    [N] whose output predicts each response token (`targets`), and `places` [M] the flat positions of those tokens in
    `shape` [B, R]. A micro-batch that does not count keeps ranks in step: its loss is multiplied by 0.
    """

    rows: Tensor
    input_ids: Tensor
    packing: Packing
    targets: Tensor
    predicts: Tensor
    places: Tensor
    shape: tuple[int, int]
    lengths: Tensor
    counts: bool = True

    @property
    def position_ids(self) -> Tensor:
        """[N]: each token's position in its own sequence."""
        return self.packing.position_ids

    @property
    def cu_seqlens(self) -> Tensor:
        """The start of each sequence, and the end of the last: int32, one more than there are sequences."""
        return self.packing.cu_seqlens

    @property
    def max_seqlen(self) -> int:
        """The longest sequence's tokens."""
        return self.packing.max_seqlen

    def spread(self, flat: Tensor) -> Tensor:
        """Values of the M response tokens as right-padded [B, R], zeros elsewhere."""
        out = flat.new_zeros(self.shape[0] * self.shape[1])
        return out.index_copy(0, self.places, flat).view(self.shape)


def make_microbatches(
    batch: Batch, *, budget_tokens: int, device: torch.device, multiple_of: int = 1, at_least: int = 0
) -> list[MicroBatch]:
    """The batch's rows as micro-batches of at most `budget_tokens` tokens; a longer row goes alone.

    Rows that the batch says belong together (the two of a pair) are in one micro-batch, in their order.
    Each is filled up to a multiple of `multiple_of` tokens by a dummy sequence. Micro-batches of dummies alone, which
    do not count, follow until there are `at_least` as many.
    """
    batch.require(("prompt_ids", "response_ids"), stage="training engine")
    prompts, responses = batch.tokens("prompt_ids"), batch.tokens("response_ids")
    lengths = prompts.lengths + responses.lengths - 1
    together = batch.meta.get(ROWS_TOGETHER, 1)
    assert isinstance(together, int), f"{ROWS_TOGETHER}={together!r}"
    micros = [
        _micro(rows, prompts.select(rows), responses.select(rows), multiple_of, device)
        for rows in microbatches(lengths, budget_tokens=budget_tokens, together=together)
    ]
    return micros + [_idle(multiple_of, device)] * (at_least - len(micros))


def columns_of(batch: Batch, micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The micro-batch's part of each column: token columns of the response right-padded with 0, row columns as is."""
    part = batch.select(micro.rows)
    width = micro.shape[1]
    columns = {name: column.to(device) for name, column in part.row_columns.items()}
    for name, ragged in part.token_columns.items():
        if name != "prompt_ids":
            columns[name] = ragged.padded(0, length=width).to(device)
    return columns


def _micro(rows: Tensor, prompts: Ragged, responses: Ragged, multiple_of: int, device: torch.device) -> MicroBatch:
    sequences = interleaved(prompts, responses)
    lengths = sequences.lengths - 1
    total = int(lengths.sum())
    missing = -total % multiple_of if total else multiple_of  # models want at least a token
    keep = torch.ones(len(sequences.values), dtype=torch.bool)
    keep[sequences.offsets[1:] - 1] = False
    ids = torch.cat([sequences.values[keep], sequences.values.new_zeros(missing)])
    counts = responses.lengths
    within = torch.arange(len(responses.values)) - responses.offsets[:-1].repeat_interleave(counts)
    row = torch.arange(len(rows))
    width = max(1, int(counts.max()))  # losses take the largest of a row's numbers
    return MicroBatch(
        rows=rows,
        input_ids=ids.to(device),
        packing=Packing((*lengths.tolist(), *([missing] if missing else [])), device),
        targets=responses.values.to(device),
        predicts=packed_predicting_positions(offsets_of(lengths)[:-1], prompts.lengths, counts).to(device),
        places=(row.repeat_interleave(counts) * width + within).to(device),
        shape=(len(rows), width),
        lengths=counts,
    )


def _idle(multiple_of: int, device: torch.device) -> MicroBatch:
    """One dummy token that predicts another, and more of them to fill up."""
    one = Ragged.from_rows([[0]], torch.int64)
    micro = _micro(torch.zeros(1, dtype=torch.int64), one, one, multiple_of, device)
    return replace(micro, rows=micro.rows[:0], counts=False)
