"""Divides a batch over ranks: samples of a prompt stay together, loads are nearly equal, and few rows move."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.accounting import distinct
from hybridflow.batch.balance import balanced_groups, exchanged_groups
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.located import Parts
from hybridflow.controller.tables import Places
from hybridflow.errors import BatchError

SLACK_FRACTION = 0.01
"""A division that moves less is preferred if no part exceeds an equal share of the tokens by more than this."""


@dataclass(frozen=True, eq=False)
class Division:
    """How a batch is divided over ranks."""

    parts: Parts | None = None
    """None: one part, which is the whole batch."""

    minibatch_rows: Sequence[tuple[int, ...]] = ()
    """For each part, its rows of each minibatch, in order; empty if minibatches are not divided separately."""

    @cached_property
    def places(self) -> Places:
        """Where the rows of the parts lie."""
        return Places(self.parts)


def divided(batch: BatchRef, num_parts: int, *, role: str, minibatch_rows: int | None = None) -> Division:
    """The parts of a batch; with `minibatch_rows`, each group of that many consecutive rows is divided separately."""
    if minibatch_rows is not None and num_parts > 1 and len(batch) > minibatch_rows:
        pieces = torch.arange(len(batch)).split(minibatch_rows)
        return batch.remembered((num_parts, minibatch_rows), lambda: _by_pieces(batch, pieces, num_parts, role))
    return batch.remembered((num_parts, None), lambda: Division(partition(batch, num_parts, role=role)))


def divided_separately(batch: BatchRef, num_parts: int, num_minibatches: int, *, role: str) -> Division:
    """The parts of an additional batch of a call: `num_minibatches` of about equal size, each divided separately."""
    if len(batch) < num_parts * num_minibatches:
        raise BatchError(
            f"The second batch of {len(batch)} rows cannot be divided into {num_minibatches} minibatches over the"
            f" {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give {num_parts * num_minibatches} rows or more, or fewer and larger minibatches.",
        )
    pieces = torch.arange(len(batch)).tensor_split(num_minibatches)
    if num_parts == 1:
        return Division(None, [tuple(map(len, pieces))])
    return _by_pieces(batch, pieces, num_parts, role)


def partition(batch: BatchRef, num_parts: int, *, role: str) -> Parts | None:
    """The parts of a batch; None for a single part, which is the whole batch and needs no column of it.

    With a `uid` column, rows of one prompt stay together and parts have about equally many tokens (this waits for the
    stage that made the tokens): the shards as they are, or consecutive rows, if these are balanced; otherwise with some
    prompts exchanged; and if that is not enough, with all prompts moved. Without `uid`, parts are consecutive rows. The
    same batch is always divided the same way.
    """
    if num_parts == 1:
        return None
    if not batch.declares("uid"):
        _check_enough(len(batch), "rows", num_parts, role)
        sizes = len(batch) // num_parts + (np.arange(num_parts) < len(batch) % num_parts)
        return Parts(torch.arange(len(batch)), sizes)
    prompts, groups = distinct(batch.row("uid"))
    _check_enough(len(prompts), "prompts", num_parts, role)
    lengths = batch.lengths.numpy()
    most = (1.0 + SLACK_FRACTION) * float(lengths.sum()) / num_parts
    candidates = (batch.rows_of_shards(num_parts), _consecutive(groups, lengths, num_parts))
    full = [parts for parts in candidates if parts is not None and parts.sizes.all()]
    whole = [(parts, owners) for parts in full if (owners := _owners(parts, groups)) is not None]
    for parts, _ in whole:
        if _heaviest(parts, lengths) <= most:
            return parts
    exchanged = _exchanged(*whole[0], groups, lengths, most=most) if whole else None
    if exchanged is not None and _heaviest(exchanged, lengths) <= most:
        return exchanged
    chosen = balanced_groups(groups.tolist(), lengths.tolist(), num_parts)
    moved = Parts(torch.tensor([row for rows in chosen for row in rows]), np.array([len(rows) for rows in chosen]))
    if exchanged is not None and _heaviest(exchanged, lengths) <= (1.0 + SLACK_FRACTION) * _heaviest(moved, lengths):
        return exchanged
    return moved


def _by_pieces(batch: BatchRef, pieces: Sequence[Tensor], num_parts: int, role: str) -> Division:
    """The parts of a batch whose pieces (row positions) are divided separately."""
    rows, owners, sizes = list[Tensor](), list[np.ndarray](), list[np.ndarray]()
    for piece in pieces:
        parts = partition(batch.take(piece), num_parts, role=role)
        assert parts is not None, "there are several parts"
        rows.append(piece[parts.rows])
        owners.append(parts.owners)
        sizes.append(parts.sizes)
    by_part = np.argsort(np.concatenate(owners), kind="stable")
    counts = np.stack(sizes, axis=1)
    return Division(Parts(torch.cat(rows)[torch.from_numpy(by_part)], counts.sum(1)), list(map(tuple, counts.tolist())))


def _consecutive(groups: np.ndarray, lengths: np.ndarray, num_parts: int) -> Parts:
    """Consecutive rows, cut at the ends of groups that are nearest to equal shares of the tokens."""
    ends = np.append(np.flatnonzero(np.diff(groups)) + 1, len(groups))
    tokens = lengths.cumsum()[ends - 1].astype(np.float64)
    shares = tokens[-1] * np.arange(1, num_parts) / num_parts
    above = np.searchsorted(tokens, shares)
    below = np.maximum(above - 1, 0)
    nearest = np.where(shares - tokens[below] <= tokens[above] - shares, below, above)
    return Parts.cut(torch.arange(len(groups)), ends[nearest])


def _owners(parts: Parts, groups: np.ndarray) -> np.ndarray | None:
    """The part that has each group [G]; None if a group has rows in two parts."""
    own, part_of = groups[parts.rows.numpy()], parts.owners
    owners = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    owners[own] = part_of
    return owners if np.array_equal(owners[own], part_of) else None


def _exchanged(
    parts: Parts, owners: np.ndarray, groups: np.ndarray, lengths: np.ndarray, *, most: float
) -> Parts | None:
    """The parts after exchanges of groups, with rows in the order that they had; None if one remains without rows."""
    num_parts = len(parts.sizes)
    moved = exchanged_groups(owners, np.bincount(groups, lengths), num_parts, most=most)
    own = moved[groups[parts.rows.numpy()]]
    sizes = np.bincount(own, minlength=num_parts)
    return Parts(parts.rows[torch.from_numpy(own.argsort(kind="stable"))], sizes) if sizes.all() else None


def _heaviest(parts: Parts, lengths: np.ndarray) -> float:
    """The most tokens of a part."""
    return float(np.bincount(parts.owners, lengths[parts.rows.numpy()]).max())


def _check_enough(count: int, unit: str, num_parts: int, role: str) -> None:
    if count < num_parts:
        raise BatchError(
            f"{count} {unit} cannot be divided over the {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give it at least {num_parts} {unit}: a larger data.batch_size, or fewer devices for the role.",
        )
