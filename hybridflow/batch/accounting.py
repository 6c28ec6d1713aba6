"""Checks that a stage loses and duplicates no rows."""

from collections import Counter

from torch import Tensor

from hybridflow.errors import BatchError


def check_accounted(entered: Tensor, left: Tensor, *, samples_per_prompt: int, stage: str) -> None:
    """Raises `BatchError` unless each `uid` in `entered` [B] occurs `samples_per_prompt` times in `left`."""
    expected = Counter({uid: samples_per_prompt * count for uid, count in _counts(entered).items()})
    found = _counts(left)
    if expected == found:
        return
    lost, extra = expected - found, found - expected
    raise BatchError(
        f"The stage '{stage}' lost {sum(lost.values())} rows (uids {sorted(lost)[:5]}) "
        f"and added {sum(extra.values())} (uids {sorted(extra)[:5]}).",
        remedy="Return each row exactly once. A dataflow must pass all rows that it generated to self.observe,"
        " including those that it did not train on.",
    )


def check_groups(uids: Tensor, *, samples_per_prompt: int) -> None:
    """Raises `BatchError` unless each `uid` in `uids` [B] occurs `samples_per_prompt` times."""
    found = _counts(uids)
    wrong = sorted(uid for uid, count in found.items() if count != samples_per_prompt)
    if wrong:
        raise BatchError(
            f"The prompt with uid {wrong[0]} has {found[wrong[0]]} samples, not {samples_per_prompt}"
            f" (rollout.samples_per_prompt); {len(wrong)} of {len(found)} prompts have lost or duplicated samples.",
            remedy="Pass all generated rows to self.observe, each exactly once, including those that the step did not"
            " train on.",
        )


def check_unique(uids: Tensor) -> None:
    """Raises `BatchError` if several prompts of a batch have the same `uid`."""
    repeated = [uid for uid, count in _counts(uids).items() if count > 1]
    if repeated:
        raise BatchError(
            f"{len(repeated)} uids belong to more than one prompt (first: {repeated[:5]}).",
            remedy="Number prompts by their position in the data stream.",
        )


def _counts(uids: Tensor) -> Counter[int]:
    """How often each occurs; of the numbers of a whole batch, only those that differ become Python objects."""
    found, counts = uids.unique(return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))
