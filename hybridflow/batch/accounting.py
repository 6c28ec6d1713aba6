"""Checks that a stage loses and duplicates no rows."""

import numpy as np
import torch
from torch import Tensor

from hybridflow.errors import BatchError


def check_accounted(entered: Tensor, left: Tensor, *, samples_per_prompt: int, stage: str) -> None:
    """Raises `BatchError` unless each `uid` in `entered` [B] occurs `samples_per_prompt` times in `left`."""
    uids, numbers = distinct(torch.cat([entered, left]))
    expected, found = (np.bincount(own, minlength=len(uids)) for own in np.split(numbers, [len(entered)]))
    surplus = found - samples_per_prompt * expected
    if not surplus.any():
        return
    lost, extra = surplus < 0, surplus > 0
    raise BatchError(
        f"The stage '{stage}' lost {-surplus[lost].sum()} rows (uids {uids[lost][:5].tolist()}) "
        f"and added {surplus[extra].sum()} (uids {uids[extra][:5].tolist()}).",
        remedy="Return each row exactly once. A dataflow must pass all rows that it generated to self.observe,"
        " including those that it did not train on.",
    )


def check_groups(uids: Tensor, *, samples_per_prompt: int) -> None:
    """Raises `BatchError` unless each `uid` in `uids` [B] occurs `samples_per_prompt` times."""
    found, counts = _counts(uids)
    if len(wrong := np.flatnonzero(counts != samples_per_prompt)):
        raise BatchError(
            f"The prompt with uid {found[wrong[0]]} has {counts[wrong[0]]} samples, not {samples_per_prompt}"
            f" (rollout.samples_per_prompt); {len(wrong)} of {len(found)} prompts have lost or duplicated samples.",
            remedy="Pass all generated rows to self.observe, each exactly once, including those that the step did not"
            " train on.",
        )


def check_unique(uids: Tensor) -> None:
    """Raises `BatchError` if several prompts of a batch have the same `uid`."""
    found, counts = _counts(uids)
    if repeated := found[counts > 1].tolist():
        raise BatchError(
            f"{len(repeated)} uids belong to more than one prompt (first: {repeated[:5]}).",
            remedy="Number prompts by their position in the data stream.",
        )


def distinct(uids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The different `uids` [B] in ascending order, and for each row [B] which of them it has.

    Most rows have the `uid` of the row before them; only the others are sorted.
    """
    rows = uids.numpy()
    is_first = np.append(True, rows[1:] != rows[:-1])[: len(rows)]
    found, numbers = np.unique(rows[is_first], return_inverse=True)
    return found, numbers[np.cumsum(is_first) - 1]


def _counts(uids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The different `uids` [B] in ascending order, and how often each occurs."""
    found, numbers = distinct(uids)
    return found, np.bincount(numbers)
