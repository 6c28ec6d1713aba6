"""The names under which metadata counts what happened in episodes, and their sums."""

from collections import Counter
from collections.abc import Iterable

from hybridflow.batch.wire import Meta

COUNTED = "environment/"
"""Prefix of all these names."""

LIMITED = f"{COUNTED}limited/"
"""Prefix of the numbers of episodes that ended at a limit; the name of the limit follows."""

DEADLINE = "deadline"
"""The limit of an episode that is withdrawn."""

WITH_NUMBER = f"{COUNTED}episodes_with/"
"""Prefix of the numbers of episodes whose environment gave a number; the name of that number follows."""

NUMBER = f"{COUNTED}info/"
"""Prefix of the sums of these numbers."""

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
