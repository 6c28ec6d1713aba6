"""The names under which metadata counts what happened in episodes, and their sums."""

from collections import Counter
from collections.abc import Iterable

from hybridflow.batch.wire import Meta

COUNTED = "environment/"
"""The beginning of all these names."""

LIMITED = f"{COUNTED}limited/"
"""The beginning of the names of episodes that ended at a limit, which follows."""

DEADLINE = "deadline"
"""The limit of an episode that is withdrawn."""

WITH_NUMBER = f"{COUNTED}episodes_with/"
"""The beginning of the names of episodes whose environment gave a number; the name of the number follows."""

NUMBER = f"{COUNTED}info/"
"""The beginning of the names of the sums of these numbers."""

ENDED = "ended/"
"""Prefix of the names above in the metadata of `PartialRollouts.advance`."""

CUT_CALLS = f"{COUNTED}cut_tool_calls"
SPECIAL_TOKENS = f"{COUNTED}special_token_replies"


def summed_counts(parts: Iterable[Meta]) -> dict[str, float]:
    """The sums of all counts in some metadata."""
    sums: Counter[str] = Counter()
    for meta in parts:
        sums.update({name: value for name, value in meta.items() if name.startswith(COUNTED)})
    return {**sums}
