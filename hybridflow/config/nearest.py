"""Suggestions for misspelled names."""

import difflib
from collections.abc import Collection, Iterable


def did_you_mean(name: str, choices: Iterable[str], *, ending: str = "") -> str:
    """Returns `Did you mean 'x'? ` with a trailing space, or an empty string if no choice is similar.

    An `ending` that all choices share, such as `.py`, is ignored in the comparison.
    """
    stems = [choice.removesuffix(ending) for choice in choices]
    near = difflib.get_close_matches(name.removesuffix(ending), stems, n=1, cutoff=0.5)
    return f"Did you mean '{near[0]}{ending}'? " if near else ""


def known_settings(owner: str, names: Collection[str]) -> str:
    """The remedy for a setting that `owner` does not have."""
    return f"Settings of {owner}: {', '.join(names)}." if names else f"Leave it out: {owner} has no settings."
