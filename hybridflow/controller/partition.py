"""Divides a batch over ranks: samples of a prompt stay together, loads are nearly equal, and few rows move."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.balance import balanced_groups, exchanged_groups
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import BatchError

SLACK_FRACTION = 0.01
"""A division that moves less is preferred if no part exceeds an equal share of the tokens by more than this."""


@dataclass(frozen=True)
class Share:
    """One part of a batch: its row positions (None: all rows), and how many of them each minibatch has, in order."""

    rows: Tensor | None = None
    minibatch_rows: tuple[int, ...] = ()


def divided(batch: BatchRef, num_parts: int, *, role: str, minibatch_rows: int | None = None) -> Sequence[Share]:
    """The parts of a batch; with `minibatch_rows`, each group of that many consecutive rows is divided separately."""
    if minibatch_rows is not None and num_parts > 1 and len(batch) > minibatch_rows:
        starts = torch.arange(minibatch_rows, len(batch), minibatch_rows)
        pieces = torch.arange(len(batch)).tensor_split(starts)
        return batch.remembered((num_parts, minibatch_rows), lambda: _by_pieces(batch, pieces, num_parts, role))
    return batch.remembered((num_parts, None), lambda: _undivided(partition(batch, num_parts, role=role)))


def divided_separately(batch: BatchRef, num_parts: int, num_minibatches: int, *, role: str) -> list[Share]:
    """The parts of an additional batch of a call: `num_minibatches` of about equal size, each divided separately."""
    if len(batch) < num_parts * num_minibatches:
        raise BatchError(
            f"The second batch of {len(batch)} rows cannot be divided into {num_minibatches} minibatches over the"
            f" {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give {num_parts * num_minibatches} rows or more, or fewer and larger minibatches.",
        )
    pieces = torch.arange(len(batch)).tensor_split(num_minibatches)
    if num_parts == 1:
        return [Share(None, tuple(map(len, pieces)))]
    return _by_pieces(batch, pieces, num_parts, role)


def partition(batch: BatchRef, num_parts: int, *, role: str) -> list[Tensor] | None:
    """Row positions of each part; None for a single part, which is the whole batch and needs no column of it.

    With a `uid` column, rows of one prompt stay together and parts have about equally many tokens (this waits for the
    stage that made the tokens): the shards as they are, or consecutive rows, if these are balanced; otherwise with some
    prompts exchanged; and if that is not enough, with all prompts moved. Without `uid`, parts are consecutive rows. The
    same batch is always divided the same way.
    """
    if num_parts == 1:
        return None
    if not batch.declares("uid"):
        _check_enough(len(batch), "rows", num_parts, role)
        return list(torch.arange(len(batch)).tensor_split(num_parts))
    lengths, groups = batch.lengths, batch.row("uid").unique(return_inverse=True)[1]
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    _check_enough(num_groups, "prompts", num_parts, role)
    most = (1.0 + SLACK_FRACTION) * float(lengths.sum()) / num_parts
    candidates = (batch.rows_of_shards(num_parts), _consecutive(groups, lengths, num_parts))
    full = [parts for parts in candidates if parts and all(len(part) for part in parts)]
    whole = [(parts, owners) for parts in full if (owners := _owners(parts, groups)) is not None]
    for parts, _ in whole:
        if _heaviest(parts, lengths) <= most:
            return parts
    exchanged = _exchanged(*whole[0], groups, lengths, most=most) if whole else None
    if exchanged is not None and _heaviest(exchanged, lengths) <= most:
        return exchanged
    chosen = balanced_groups(groups.tolist(), lengths.tolist(), num_parts)
    moved = [torch.tensor(rows, dtype=torch.int64) for rows in chosen]
    if exchanged is not None and _heaviest(exchanged, lengths) <= (1.0 + SLACK_FRACTION) * _heaviest(moved, lengths):
        return exchanged
    return moved


def _undivided(parts: Sequence[Tensor] | None) -> list[Share]:
    return [Share()] if parts is None else [Share(rows) for rows in parts]


def _by_pieces(batch: BatchRef, pieces: Sequence[Tensor], num_parts: int, role: str) -> list[Share]:
    """The parts of a batch whose pieces (row positions) are divided separately."""
    divided_pieces: list[list[Tensor]] = []
    for rows in pieces:
        parts = partition(batch.take(rows), num_parts, role=role)
        assert parts is not None, "there are several parts"
        divided_pieces.append([rows[part] for part in parts])
    return [Share(torch.cat(part), tuple(map(len, part))) for part in zip(*divided_pieces, strict=True)]


def _consecutive(groups: Tensor, lengths: Tensor, num_parts: int) -> list[Tensor]:
    """Consecutive rows, cut at the ends of groups that are nearest to equal shares of the tokens."""
    ends = torch.cat([(groups.diff() != 0).nonzero().flatten() + 1, torch.tensor([len(groups)])])
    tokens = lengths.cumsum(0)[ends - 1].double()
    shares = tokens[-1] * torch.arange(1, num_parts) / num_parts
    above = torch.searchsorted(tokens, shares)
    below = (above - 1).clamp(min=0)
    nearest = torch.where(shares - tokens[below] <= tokens[above] - shares, below, above)
    return list(torch.arange(len(groups)).tensor_split(ends[nearest]))


def _owners(parts: Sequence[Tensor], groups: Tensor) -> np.ndarray | None:
    """The part that has each group [G]; None if a group has rows in two parts."""
    own, part_of = groups[torch.cat(list(parts))].numpy(), _part_of(parts)
    owners = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    owners[own] = part_of
    return owners if np.array_equal(owners[own], part_of) else None


def _exchanged(
    parts: Sequence[Tensor], owners: np.ndarray, groups: Tensor, lengths: Tensor, *, most: float
) -> list[Tensor] | None:
    """The parts after exchanges of groups, with rows in the order that they had; None if one remains without rows."""
    costs = np.bincount(groups.numpy(), lengths.numpy())
    moved = torch.from_numpy(exchanged_groups(owners, costs, len(parts), most=most))
    rows = torch.cat(list(parts))
    own = moved[groups[rows]]
    counts = torch.bincount(own, minlength=len(parts)).tolist()
    return list(rows[own.argsort(stable=True)].split(counts)) if all(counts) else None


def _heaviest(parts: Sequence[Tensor], lengths: Tensor) -> float:
    """The most tokens of a part."""
    return float(np.bincount(_part_of(parts), lengths[torch.cat(list(parts))].numpy()).max())


def _part_of(parts: Sequence[Tensor]) -> np.ndarray:
    """The part of each row, in the order of the parts."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _check_enough(count: int, unit: str, num_parts: int, role: str) -> None:
    if count < num_parts:
        raise BatchError(
            f"{count} {unit} cannot be divided over the {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give it at least {num_parts} {unit}: a larger data.batch_size, or fewer devices for the role.",
        )
