"""Divides a batch over ranks: samples of a prompt stay together, loads are nearly equal, and few rows move."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
import torch

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
        ends = np.append(np.arange(minibatch_rows, len(batch), minibatch_rows), len(batch))
        return batch.remembered((num_parts, minibatch_rows), lambda: _by_minibatches(batch, ends, num_parts, role))
    return batch.remembered((num_parts, None), lambda: Division(partition(batch, num_parts, role=role)))


def divided_separately(batch: BatchRef, num_parts: int, num_minibatches: int, *, role: str) -> Division:
    """The parts of an additional batch of a call: `num_minibatches` of about equal size, each divided separately."""
    if len(batch) < num_parts * num_minibatches:
        raise BatchError(
            f"The second batch of {len(batch)} rows cannot be divided into {num_minibatches} minibatches over the"
            f" {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give {num_parts * num_minibatches} rows or more, or fewer and larger minibatches.",
        )
    sizes = [len(piece) for piece in np.array_split(np.arange(len(batch)), num_minibatches)]
    if num_parts == 1:
        return Division(None, [tuple(sizes)])
    return _by_minibatches(batch, np.cumsum(sizes), num_parts, role)


def partition(batch: BatchRef, num_parts: int, *, role: str) -> Parts | None:
    """The parts of a batch; None for a single part, which is the whole batch and needs no column of it.

    With a `uid` column, rows of one prompt stay together and parts have about equally many tokens (this waits for the
    stage that made the tokens): the shards as they are, or consecutive rows, if these are balanced; otherwise with some
    prompts exchanged; and if that is not enough, with all prompts moved. Without `uid`, parts are consecutive rows. The
    same batch is always divided the same way.
    """
    return None if num_parts == 1 else _parts_of_minibatches(batch, np.array([len(batch)]), num_parts, role)


def _by_minibatches(batch: BatchRef, ends: np.ndarray, num_parts: int, role: str) -> Division:
    """The parts of a batch whose consecutive minibatches, which end at `ends` [M], are divided separately."""
    parts = _parts_of_minibatches(batch, ends, num_parts, role)
    by_part = np.argsort(parts.owners % num_parts, kind="stable")
    counts = parts.sizes.reshape(-1, num_parts).T
    return Division(Parts(parts.rows[torch.from_numpy(by_part)], counts.sum(1)), list(map(tuple, counts.tolist())))


def _parts_of_minibatches(batch: BatchRef, ends: np.ndarray, num_parts: int, role: str) -> Parts:
    """The parts of the first minibatch of a batch, then those of the next, [M * num_parts]; see `partition`.

    All minibatches are divided at once, by the same method; if there is none for all, each is divided by itself.
    """
    sizes = np.diff(ends, prepend=0)
    if not batch.declares("uid"):
        _check_enough(int(sizes.min()), "rows", num_parts, role)
        equal = sizes[:, None] // num_parts + (np.arange(num_parts) < sizes[:, None] % num_parts)
        return Parts(torch.arange(len(batch)), equal.flatten())
    minibatches = np.repeat(np.arange(len(ends)), sizes)
    prompts, groups = distinct(batch.row("uid"))
    num_prompts = len(prompts)
    if len(ends) > 1:  # a prompt with rows in two minibatches is two groups
        prompts, groups = distinct(torch.from_numpy(groups * len(ends) + minibatches))
        num_prompts = int(np.bincount(prompts % len(ends), minlength=len(ends)).min())
    _check_enough(num_prompts, "prompts", num_parts, role)
    lengths = batch.lengths.numpy()
    most = (1.0 + SLACK_FRACTION) * np.bincount(minibatches, lengths) / num_parts
    candidates = (batch.rows_of_shards(num_parts, minibatches), _consecutive(groups, lengths, ends, num_parts))
    full = [parts for parts in candidates if parts is not None and parts.sizes.all()]
    whole = [(parts, owners) for parts in full if (owners := _owners(parts, groups)) is not None]
    for parts, _ in whole:
        if (_heaviest(parts, lengths, num_parts) <= most).all():
            return parts
    exchanged = _exchanged(*whole[0], groups, lengths, num_parts, most=most) if whole else None
    if exchanged is not None or len(ends) == 1:
        return _moved_where_needed(exchanged, ends, groups, lengths, num_parts, most=most)
    bounds = list(pairwise([0, *ends.tolist()]))
    each = [_parts_of_minibatches(batch.take(range(*own)), np.diff(own), num_parts, role) for own in bounds]
    rows = [parts.rows + start for parts, (start, _) in zip(each, bounds, strict=True)]
    return Parts(torch.cat(rows), np.concatenate([parts.sizes for parts in each]))


def _consecutive(groups: np.ndarray, lengths: np.ndarray, ends: np.ndarray, num_parts: int) -> Parts:
    """Consecutive rows: minibatches, cut at the ends of groups that are nearest to equal shares of their tokens."""
    cuts = np.append(np.flatnonzero(np.diff(groups)) + 1, len(groups))
    total = lengths.cumsum()
    tokens, after = total[cuts - 1].astype(np.float64), total[ends - 1].astype(np.float64)
    before = np.append(0.0, after[:-1])
    shares = before[:, None] + (after - before)[:, None] * np.arange(1, num_parts) / num_parts
    above = np.searchsorted(tokens, shares)
    below = np.maximum(above - 1, 0)
    nearest = np.where(shares - tokens[below] <= tokens[above] - shares, below, above)
    inner_ends = np.maximum(cuts[nearest], np.append(0, ends[:-1])[:, None])  # a minibatch may have no tokens
    part_ends = np.concatenate([inner_ends, ends[:, None]], axis=1).flatten()
    return Parts(torch.arange(len(groups)), np.diff(part_ends, prepend=0))


def _owners(parts: Parts, groups: np.ndarray) -> np.ndarray | None:
    """The part that has each group [G]; None if a group has rows in two parts."""
    own, part_of = groups[parts.rows.numpy()], parts.owners
    owners = np.zeros(int(groups.max()) + 1, dtype=np.int64)
    owners[own] = part_of
    return owners if np.array_equal(owners[own], part_of) else None


def _exchanged(
    parts: Parts, owners: np.ndarray, groups: np.ndarray, lengths: np.ndarray, num_parts: int, *, most: np.ndarray
) -> Parts | None:
    """The parts after exchanges of groups, with rows in the order that they had; None if one remains without rows."""
    moved = exchanged_groups(owners, np.bincount(groups, lengths), num_parts, most=most)
    own = moved[groups[parts.rows.numpy()]]
    sizes = np.bincount(own, minlength=len(parts.sizes))
    return Parts(parts.rows[torch.from_numpy(own.argsort(kind="stable"))], sizes) if sizes.all() else None


def _moved_where_needed(
    parts: Parts | None, ends: np.ndarray, groups: np.ndarray, lengths: np.ndarray, num_parts: int, *, most: np.ndarray
) -> Parts:
    """Moves all groups of each minibatch whose parts are unbalanced, if that balances it better; without `parts`, of
    every minibatch."""
    each = list[Parts]()
    for minibatch, (start, stop) in enumerate(pairwise([0, *ends.tolist()])):
        own = None if parts is None else Parts(parts.rows[start:stop], parts.sizes.reshape(-1, num_parts)[minibatch])
        if own is None or (_heaviest(own, lengths, num_parts) > most[minibatch]).all():
            chosen = balanced_groups(groups[start:stop], lengths[start:stop], num_parts)
            moved = Parts(start + torch.tensor(list(chain(*chosen))), np.array(list(map(len, chosen))))
            enough = (1.0 + SLACK_FRACTION) * _heaviest(moved, lengths, num_parts)
            own = moved if own is None or (_heaviest(own, lengths, num_parts) > enough).all() else own
        each.append(own)
    return Parts(torch.cat([own.rows for own in each]), np.concatenate([own.sizes for own in each]))


def _heaviest(parts: Parts, lengths: np.ndarray, num_parts: int) -> np.ndarray:
    """The most tokens of a part of each minibatch [M]."""
    loads = np.bincount(parts.owners, lengths[parts.rows.numpy()], minlength=len(parts.sizes))
    return loads.reshape(-1, num_parts).max(1)


def _check_enough(count: int, unit: str, num_parts: int, role: str) -> None:
    if count < num_parts:
        raise BatchError(
            f"{count} {unit} cannot be divided over the {num_parts} data-parallel ranks of '{role}'.",
            remedy=f"Give it at least {num_parts} {unit}: a larger data.batch_size, or fewer devices for the role.",
        )
