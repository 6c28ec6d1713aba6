"""Microbatches as models read them: packed sequences, without padding."""

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
    """Packed rows of a batch, on a device.

    `input_ids` [N] are prompts and responses, each row without its last token, which predicts nothing; `packing` has
    the lengths of their sequences: one per row, and one for each fork (`fork_starts`). A dummy sequence at the end may
    fill up N. `predicts` [M] are the positions in [N] whose outputs predict the response tokens (`targets`; what
    predicts the first token of a fork is in the sequence before it, and means nothing), and `places` [M] the flat
    positions of these tokens in `shape` [B, R]. A microbatch that does not count keeps ranks in step: its loss is
    multiplied by 0.
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

    def spread(self, flat: Tensor) -> Tensor:
        """Values of the M response tokens as right-padded [B, R], zeros elsewhere."""
        out = flat.new_zeros(self.shape[0] * self.shape[1])
        return out.index_copy(0, self.places, flat).view(self.shape)


def make_microbatches(
    batch: Batch, *, budget_tokens: int, device: torch.device, multiple_of: int = 1, at_least: int = 0
) -> list[MicroBatch]:
    """The batch's rows as microbatches of at most `budget_tokens` tokens; a longer row is a microbatch of its own.

    Rows that belong together according to the batch (the two of a pair) are in one microbatch, in order. A dummy
    sequence fills each microbatch up to a multiple of `multiple_of` tokens. Microbatches of dummies, which do not
    count, are appended until there are `at_least` as many.
    """
    batch.require(("prompt_ids", "response_ids"), stage="training engine")
    prompts, responses = batch.tokens("prompt_ids"), batch.tokens("response_ids")
    forks = batch.tokens("fork_starts") if "fork_starts" in batch else Ragged.from_rows([[]] * len(batch), torch.int64)
    lengths = prompts.lengths + responses.lengths - 1
    together = batch.meta.get(ROWS_TOGETHER, 1)
    assert isinstance(together, int), f"{ROWS_TOGETHER}={together!r}"
    micros = [
        _micro(rows, prompts.select(rows), responses.select(rows), forks.select(rows), multiple_of, device)
        for rows in microbatches(lengths, budget_tokens=budget_tokens, together=together)
    ]
    return micros + [_idle(multiple_of, device)] * (at_least - len(micros))


def columns_of(batch: Batch, micro: MicroBatch, device: torch.device) -> dict[str, Tensor]:
    """The microbatch's rows of each column: response token columns right-padded with 0, row columns unchanged."""
    part = batch.select(micro.rows)
    width = micro.shape[1]
    columns = {name: column.to(device) for name, column in part.row_columns.items()}
    for name, ragged in part.token_columns.items():
        if name != "prompt_ids":
            columns[name] = ragged.padded(0, length=width).to(device)
    return columns


def _micro(
    rows: Tensor, prompts: Ragged, responses: Ragged, forks: Ragged, multiple_of: int, device: torch.device
) -> MicroBatch:
    sequences = interleaved(prompts, responses)
    lengths = sequences.lengths - 1
    total = int(lengths.sum())
    missing = -total % multiple_of if total else multiple_of  # models need at least one token
    keep = torch.ones(len(sequences.values), dtype=torch.bool)
    keep[sequences.offsets[1:] - 1] = False
    ids = torch.cat([sequences.values[keep], sequences.values.new_zeros(missing)])
    counts = responses.lengths
    within = torch.arange(len(responses.values)) - responses.offsets[:-1].repeat_interleave(counts)
    row = torch.arange(len(rows))
    width = max(1, int(counts.max()))  # losses take the maximum over a row
    return MicroBatch(
        rows=rows,
        input_ids=ids.to(device),
        packing=Packing((*_sequence_lengths(lengths, prompts, forks), *([missing] if missing else [])), device),
        targets=responses.values.to(device),
        predicts=packed_predicting_positions(offsets_of(lengths)[:-1], prompts.lengths, counts).to(device),
        places=(row.repeat_interleave(counts) * width + within).to(device),
        shape=(len(rows), width),
        lengths=counts,
    )


def _sequence_lengths(lengths: Tensor, prompts: Ragged, forks: Ragged) -> list[int]:
    """The lengths of the sequences of all rows, which are divided where a fork begins."""
    if not len(forks.values):
        return lengths.tolist()
    starts = offsets_of(lengths)[:-1]
    fork_starts = forks.values + (starts + prompts.lengths).repeat_interleave(forks.lengths)
    bounds = torch.cat([starts, fork_starts, lengths.sum()[None]]).sort().values
    return bounds.diff().tolist()


def _idle(multiple_of: int, device: torch.device) -> MicroBatch:
    """A microbatch of dummy tokens, which does not count."""
    one = Ragged.from_rows([[0]], torch.int64)
    none = Ragged.from_rows([[]], torch.int64)
    micro = _micro(torch.zeros(1, dtype=torch.int64), one, one, none, multiple_of, device)
    return replace(micro, rows=micro.rows[:0], counts=False)
