"""Microbatches as models read them: packed sequences, without padding."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridflow.algorithms.logprobs import packed_predicting_positions
from hybridflow.batch import Batch, Ragged
from hybridflow.batch.iterate import ROWS_TOGETHER, SHORTEST_PREFIX, microbatches
from hybridflow.batch.prefix_tree import prefix_tree, without_sharing
from hybridflow.batch.ragged import interleaved, numbers_in_rows
from hybridflow.models.packing import Packing


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows of a batch, on a device.

    `input_ids` [N] are prompts and responses, each row without its last token, which predicts nothing; `packing` has
    the lengths of their sequences: one per row, and one for each fork (`fork_starts`). A prefix that sequences share
    may be there once. A dummy sequence at the end may fill up N. `predicts` [M] are the positions in [N] whose outputs
    predict the response tokens (`targets`; what predicts the first token of a fork is in the sequence before it, and
    means nothing), and `places` [M] the flat positions of these tokens in `shape` [B, R]. A microbatch that does not
    count keeps ranks in step: its loss is multiplied by 0.
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
    batch: Batch,
    *,
    budget_tokens: int,
    device: torch.device,
    multiple_of: int = 1,
    at_least: int = 0,
    shares_prefixes: bool = False,
) -> list[MicroBatch]:
    """The batch's rows as microbatches of at most `budget_tokens` tokens; a longer row is a microbatch of its own.

    Rows that belong together according to the batch (the two of a pair) are in one microbatch, in order. With
    `shares_prefixes`, a prefix that rows of a microbatch have in common is there once, and rows with the same prefix
    stay together where they fit. A dummy sequence fills each microbatch up to a multiple of `multiple_of` tokens.
    Microbatches of dummies, which do not count, are appended until there are `at_least` as many.
    """
    batch.require(("prompt_ids", "response_ids"), stage="training engine")
    prompts, responses = batch.tokens("prompt_ids"), batch.tokens("response_ids")
    forks = batch.tokens("fork_starts") if "fork_starts" in batch else None
    inputs = _without_last(interleaved(prompts, responses))
    together = batch.meta.get(ROWS_TOGETHER, 1)
    assert isinstance(together, int), f"{ROWS_TOGETHER}={together!r}"
    shared = inputs if shares_prefixes else None
    micros = [
        _micro(
            rows,
            prompts.select(rows),
            responses.select(rows),
            multiple_of,
            device,
            forks=None if forks is None else forks.select(rows),
            shares_prefixes=shares_prefixes,
        )
        for rows in microbatches(inputs.lengths, budget_tokens=budget_tokens, together=together, sequences=shared)
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
    rows: Tensor,
    prompts: Ragged,
    responses: Ragged,
    multiple_of: int,
    device: torch.device,
    *,
    forks: Ragged | None = None,
    shares_prefixes: bool = False,
) -> MicroBatch:
    inputs = _without_last(interleaved(prompts, responses))
    sequences = inputs if forks is None else _divided(inputs, prompts, forks)
    tree = prefix_tree(sequences, at_least=SHORTEST_PREFIX) if shares_prefixes else without_sharing(sequences)
    total = len(tree.values)
    missing = -total % multiple_of if total else multiple_of  # models need at least one token
    filler = [missing] if missing else []
    counts = responses.lengths
    within = numbers_in_rows(counts)
    row = torch.arange(len(rows))
    width = max(1, int(counts.max()))  # losses take the maximum over a row
    predicts = packed_predicting_positions(inputs.offsets[:-1], prompts.lengths, counts)
    is_shared = any(parent >= 0 for parent in tree.parents)
    return MicroBatch(
        rows=rows,
        input_ids=torch.cat([tree.values, tree.values.new_zeros(missing)]).to(device),
        packing=Packing(
            (*tree.lengths, *filler), device, parents=(*tree.parents, *(-1 for _ in filler)) if is_shared else ()
        ),
        targets=responses.values.to(device),
        predicts=tree.positions.values[predicts].to(device),
        places=(row.repeat_interleave(counts) * width + within).to(device),
        shape=(len(rows), width),
        lengths=counts,
    )


def _without_last(sequences: Ragged) -> Ragged:
    keep = torch.ones(len(sequences.values), dtype=torch.bool)
    keep[sequences.offsets[1:] - 1] = False
    return Ragged.from_lengths(sequences.values[keep], sequences.lengths - 1)


def _divided(inputs: Ragged, prompts: Ragged, forks: Ragged) -> Ragged:
    """The sequences of all rows, which are divided where a fork begins."""
    starts = forks.values + (inputs.offsets[:-1] + prompts.lengths).repeat_interleave(forks.lengths)
    return Ragged.from_lengths(inputs.values, torch.cat([inputs.offsets, starts]).sort().values.diff())


def _idle(multiple_of: int, device: torch.device) -> MicroBatch:
    """A microbatch of dummy tokens, which does not count."""
    one = Ragged.from_rows([[0]], torch.int64)
    micro = _micro(torch.zeros(1, dtype=torch.int64), one, one, multiple_of, device)
    return replace(micro, rows=micro.rows[:0], counts=False)
