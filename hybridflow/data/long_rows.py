"""Rows over a length limit: an error that counts them, or left out when asked."""

import logging
from collections.abc import Callable, Sequence

from hybridflow.errors import DataError

logger = logging.getLogger(__name__)


def rows_within(
    lengths: Sequence[int], limit: int, *, setting: str, what: str, drop: bool, place: Callable[[int], str]
) -> list[int]:
    """Positions of the rows of at most `limit` tokens; any longer is an error unless `drop`, which says how many.

    `setting` is the limit's key, `what` the plural of what is measured, and `place` says where a row stands.
    """
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    long = len(lengths) - len(kept)
    if long == 0:
        return kept
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    over = f"longer than {setting}={limit} tokens"
    found = f"{long} of {len(lengths)} {what} are {over}"
    detail = f"the longest, {place(longest)}, has {lengths[longest]}"
    if not drop:
        raise DataError(
            f"{found} ({detail}).",
            remedy=f"Set {setting}={lengths[longest]}, or data.drop_long_prompts=true to leave the long ones out.",
        )
    if not kept:
        raise DataError(f"{found}, so none is left ({detail}).", remedy=f"Raise {setting}.")
    logger.warning("data.drop_long_prompts=true leaves out %d of %d %s %s (%s)", long, len(lengths), what, over, detail)
    return kept
