"""Rows longer than data.max_prompt_tokens or data.max_response_tokens: an error, left out, or cut."""

import logging
from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase

from hybridflow.config.data import Data, Truncation
from hybridflow.data.sources import Table
from hybridflow.data.tokenization import PromptCompletion, TokenizedCompletions, completion_token_ids
from hybridflow.errors import DataError
from hybridflow.observability.formatting import percent

logger = logging.getLogger(__name__)


class RowsTooLong(DataError):
    """Rows of more than `limit` tokens. A limit of `needed` tokens would keep them all; None if that is not known."""

    def __init__(self, message: str, *, setting: str, limit: int, needed: int | None, count: int) -> None:
        self._truncate = f"data.truncation=drop to leave out long rows ({count}), or =left or =right to cut them."
        raised = "" if needed is None else f"{setting}={needed} if the model can read that many, or "
        super().__init__(message, remedy=f"Set {raised}{self._truncate}")
        self.setting, self.limit, self.needed = setting, limit, needed

    def of_model(self, max_tokens: int, *, asked: int) -> DataError:
        """The same error, with a remedy that raises the limit no further than the model can read.

        The model reads `max_tokens`; with the present limits, prompts and responses have up to `asked` tokens.
        """
        if self.needed is None or not max_tokens or asked - self.limit + self.needed <= max_tokens:
            return self
        most = max_tokens - (asked - self.limit)
        raised = f"{self.setting}={most}, the most that fits, and " if most > self.limit else ""
        return DataError(
            f"{self.message} The model reads {max_tokens} tokens, including the response.",
            remedy=f"Set {raised}{self._truncate}",
        )


def completions_within_limits(
    rows: Sequence[PromptCompletion],
    config: Data,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    *,
    is_part: bool,
    together: int = 1,
) -> tuple[TokenizedCompletions, list[int]]:
    """Token ids of rows, cut at both limits, and the positions of the rows to use, by both limits.

    `together` successive rows have one prompt, and count as one row: 2 for pairs.
    """
    prompt_limit, limit = config.max_prompt_tokens, config.max_response_tokens
    longest = tokens_to_read(prompt_limit + limit, config)
    ids = completion_token_ids(rows, tokenizer, stop_ids, max_tokens=longest, is_part=is_part)
    kept = {*range(len(rows) // together)}
    for setting, most, what, found in (
        ("data.max_prompt_tokens", prompt_limit, "prompts", ids.prompts),
        ("data.max_response_tokens", limit, "completions", ids.responses),
    ):
        kept &= {*rows_within(
            [max(map(len, found[first : first + together])) for first in range(0, len(found), together)],
            most, setting=setting, what=what, truncation=config.truncation,
            place=lambda row: rows[row * together].place, is_part=is_part,
        )}  # fmt: skip
    responses, masks = [row[:limit] for row in ids.responses], [row[:limit] for row in ids.masks]
    return TokenizedCompletions(cut_prompts(ids.prompts, config), responses, masks), sorted(kept)


def rows_within(
    lengths: Sequence[int],
    limit: int,
    *,
    setting: str,
    what: str,
    truncation: Truncation,
    place: Callable[[int], str],
    at_least: Collection[int] = (),
    is_part: bool,
) -> list[int]:
    """Positions of the rows to use: raises `RowsTooLong` for rows of more than `limit` tokens, or logs how many are
    left out or cut.

    `setting` is the limit's key, `what` the plural of what is measured, and `place` says where a row is. Rows in
    `at_least` may have more tokens than their length says, because only their beginnings were tokenized. Those
    of parts of a stream are counted by the stream.
    """
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    long = len(lengths) - len(kept)
    if long == 0:
        return kept
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    over = f"longer than {setting}={limit} tokens"
    found = f"{long} of {len(lengths)} {what} are {over}"
    needed, detail = lengths[longest], f"the longest, {place(longest)}, has {lengths[longest]}"
    if cut := [row for row in at_least if lengths[row] > limit]:
        needed, detail = None, f"{place(cut[0])} has {lengths[cut[0]]} or more"
    if truncation is Truncation.error:
        raise RowsTooLong(f"{found} ({detail}).", setting=setting, limit=limit, needed=needed, count=long)
    does = "cuts" if truncation.cuts else "leaves out"
    logger.log(
        logging.DEBUG if is_part else logging.WARNING,
        "data.truncation=%s %s %d of %d %s %s (%s)", truncation.name, does, long, len(lengths), what, over, detail,
    )  # fmt: skip
    return [*range(len(lengths))] if truncation.cuts else kept


def tokens_to_read(limit: int, config: Data, *, keeps_beginning: bool = False) -> int | None:
    """How many tokens of a row must be known; None for all, because the cut may keep what follows."""
    needs_all = config.truncation is Truncation.left or (config.truncation.cuts and not keeps_beginning)
    return None if needs_all else limit


def cut_prompts(rows: Sequence[list[int]], config: Data) -> list[list[int]]:
    """The prompts, each with at most `data.max_prompt_tokens` tokens."""
    keeps_end, limit = config.truncation is Truncation.left, config.max_prompt_tokens
    return [row if len(row) <= limit else row[-limit:] if keeps_end else row[:limit] for row in rows]


def check_kept(kept: int, total: int, config: Data, table: Table, *, of: str) -> None:
    """Warns of how many of a source's rows are kept, if not all; a share below `data.min_kept_fraction` is an error.

    `of` is what a row holds, in the plural. Those of parts of a stream are counted by the stream.
    """
    if kept == total or table.is_part:
        return
    found = f"{kept} of {total} {of}"
    if kept == 0 or kept < config.min_kept_fraction * total:
        low = "" if kept == 0 else f", or lower data.min_kept_fraction={config.min_kept_fraction}"
        why = "too long, blank, or have identical responses" if of == "pairs" else "too long or blank"
        raise DataError(
            f"'{table.name}': only {found} ({percent(kept, total)}) can be used; the others are {why}.",
            remedy="Raise data.max_prompt_tokens and data.max_response_tokens if the model can read more, shorten or"
            f" drop rows with data.map{low}.",
        )
    logger.warning("data=%s %s kept (%s)", table.name, found, percent(kept, total))
