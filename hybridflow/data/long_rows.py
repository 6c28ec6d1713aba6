"""Rows over a length limit: an error that counts them, or left out when asked."""

import logging
from collections.abc import Callable, Collection, Sequence

from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

SMALLEST_SHARE = 0.05
"""Share of the rows that must be left; fewer are taken for a limit that does not fit the data."""


def rows_within(
    lengths: Sequence[int],
    limit: int,
    *,
    setting: str,
    what: str,
    drop: bool,
    place: Callable[[int], str],
    at_least: Collection[int] = (),
) -> list[int]:
    """Positions of the rows of at most `limit` tokens; any longer is an error unless `drop`, which says how many.

    `setting` is the limit's key, `what` the plural of what is measured, and `place` says where a row stands. Rows in
    `at_least` may not have been tokenised to their ends.
    """
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    long = len(lengths) - len(kept)
    if long == 0:
        return kept
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    over = f"longer than {setting}={limit} tokens"
    found = f"{long} of {len(lengths)} {what} are {over}"
    far = [row for row in at_least if lengths[row] > limit]
    advice = "" if far else f"{setting}={lengths[longest]} if the model reads as many, or "
    detail = f"the longest, {place(longest)}, has {lengths[longest]}"
    if far:
        detail = f"{place(far[0])} has {lengths[far[0]]} or more"
    if not drop:
        raise DataError(
            f"{found} ({detail}).",
            remedy=f"Set {advice}data.drop_long_prompts=true to leave the {long} long ones out.",
        )
    logger.warning("data.drop_long_prompts=true leaves out %d of %d %s %s (%s)", long, len(lengths), what, over, detail)
    return kept


def check_left(left: int, total: int, *, settings: str) -> None:
    """Says how many rows are within the limits where some are not; fewer than `SMALLEST_SHARE` are an error."""
    if left == total:
        return
    found = f"{left} of {total} rows are left ({100 * left / total:.0f} %)"
    if left < SMALLEST_SHARE * total:
        raise DataError(
            f"{found} after data.drop_long_prompts=true left out the long ones.",
            remedy=f"Raise {settings}, or keep only the rows you mean with data.filters.",
        )
    logger.warning("%s", found)
