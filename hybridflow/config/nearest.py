"""What the user may have meant: the nearest of the names that exist."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, choices: Iterable[str], *, ending: str = "") -> str:
    """`Did you mean 'x'? `, with the space that follows it, or nothing when no choice is near.

    An `ending` that all of them share, such as `.py`, does not make two names similar.
    """
    stems = [choice.removesuffix(ending) for choice in choices]
    near = difflib.get_close_matches(name.removesuffix(ending), stems, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}{ending}'? " if near else ""
