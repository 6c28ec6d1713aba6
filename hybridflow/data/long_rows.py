"""Rows over a length limit: an error that counts them, or left out when asked."""

import logging
from collections.abc import Callable, Collection, Sequence

from hybridflow.errors import DataError

logger = logging.getLogger(__name__)

SMALLEST_SHARE = 0.05
"""Share of the rows that must be left; fewer are taken for a limit that does not fit the data."""


class RowsTooLong(DataError):
    """Rows of more than `limit` tokens. `needed` tokens would hold the longest; None where that is not known."""

    def __init__(self, message: str, *, setting: str, limit: int, needed: int | None, count: int) -> None:
        self._otherwise = f"data.drop_long_prompts=true to leave the {count} long ones out."
        raised = "" if needed is None else f"{setting}={needed} if the model reads as many, or "
        super().__init__(message, remedy=f"Set {raised}{self._otherwise}")
        self.limit, self.needed = limit, needed

    def of_model(self, most_tokens: int, *, asked: int) -> DataError:
        """The same error, or one whose remedy raises no limit, if the model cannot read the sequences of a raised one.

        The model reads `most_tokens`; the prompts and responses have up to `asked` tokens under the limits as they are.
        """
        if self.needed is None or not most_tokens or asked - self.limit + self.needed <= most_tokens:
            return self
        return DataError(
            f"{self.message} The model reads {most_tokens} tokens, the response's among them.",
            remedy=f"Set {self._otherwise}",
        )


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
    detail = f"the longest, {place(longest)}, has {lengths[longest]}"
    if far:
        detail = f"{place(far[0])} has {lengths[far[0]]} or more"
    if not drop:
        needed = None if far else lengths[longest]
        raise RowsTooLong(f"{found} ({detail}).", setting=setting, limit=limit, needed=needed, count=long)
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
