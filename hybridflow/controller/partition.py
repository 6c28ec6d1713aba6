"""Divides a batch over ranks: samples of a prompt stay together, loads are nearly equal, and few rows move."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.batch.balance import balanced_groups
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.errors import BatchError

SLACK_FRACTION = 0.01
"""A division that moves less is preferred if no part exceeds an equal share of the tokens by more than this."""


@dataclass(frozen=True)
class Share:
    """One part of a batch: its row positions (None: all rows), and how many of them each minibatch has, in order."""

    rows: Tensor | None = None
    minibatch_rows: tuple[int, ...] = ()


def divided(batch: BatchRef, num_parts: int, *, role: str, minibatch_rows: int | None = None) -> list[Share]:
    """The parts of a batch; with `minibatch_rows`, each group of that many consecutive rows is divided separately."""
    if minibatch_rows is not None and num_parts > 1 and len(batch) > minibatch_rows:
        starts = torch.arange(minibatch_rows, len(batch), minibatch_rows)
        return _by_pieces(batch, torch.arange(len(batch)).tensor_split(starts), num_parts, role)
    parts = partition(batch, num_parts, role=role)
    return [Share()] if parts is None else [Share(rows) for rows in parts]


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
    stage that made the tokens): the shards as they are, or consecutive rows, if these are balanced; otherwise groups
    of rows are moved. Without `uid`, parts are consecutive rows. The same batch is always divided the same way.
    """
    if num_parts == 1:
        return None
    if not batch.declares("uid"):
        _check_enough(len(batch), "rows", num_parts, role)
        return list(torch.arange(len(batch)).tensor_split(num_parts))
    uids, lengths = batch.row("uid"), batch.lengths
    groups = uids.unique(return_inverse=True)[1]
    _check_enough(int(groups.max()) + 1 if len(groups) else 0, "prompts", num_parts, role)
    for parts in (batch.rows_of_shards(num_parts), _consecutive(groups, lengths, num_parts)):
        if parts and _keeps_groups(parts, groups) and _is_balanced(parts, lengths):
            return parts
    chosen = balanced_groups(groups.tolist(), lengths.tolist(), num_parts)
    return [torch.tensor(rows, dtype=torch.int64) for rows in chosen]


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
    cuts = ends[(tokens[None] - shares[:, None]).abs().argmin(1)]
    return list(torch.arange(len(groups)).tensor_split(cuts))


def _keeps_groups(parts: Sequence[Tensor], groups: Tensor) -> bool:
    """Whether no group has rows in two parts, and no part is empty."""
    return all(len(part) for part in parts) and (
        sum(len(groups[part].unique()) for part in parts) == int(groups.max()) + 1
    )


def _is_balanced(parts: Sequence[Tensor], lengths: Tensor) -> bool:
    loads = [int(lengths[part].sum()) for part in parts]
    return max(loads) <= (1.0 + SLACK_FRACTION) * sum(loads) / len(loads)


def _check_enough(count: int, unit: str, num_parts: int, role: str) -> None:
    if count < num_parts:
        raise BatchError(
            f"{count} {unit} cannot be divided over the {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give it at least {num_parts} {unit}: a larger data.batch_size, or fewer devices for the role.",
        )
