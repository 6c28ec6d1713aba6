"""Suggestions for misspelled names."""

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path

_MOST_NAMED = 3


def did_you_mean_any(name: str, choices: Collection[str]) -> str:
    """Returns `Did you mean 'x' or 'y'? ` with up to three choices: those that contain the name, then similar ones."""
    near = [*(c for c in choices if name and name in c), *difflib.get_close_matches(name, choices, n=_MOST_NAMED)]
    named = [f"'{choice}'" for choice in dict.fromkeys(near)][:_MOST_NAMED]
    return f"Did you mean {' or '.join(filter(None, [', '.join(named[:-1]), named[-1]]))}? " if named else ""


def did_you_mean(name: str, choices: Iterable[str], *, are_files: bool = False) -> str:
    """Returns `Did you mean 'x'? ` with a trailing space, or an empty string if no choice is similar.

    The names of files are compared without their endings, such as `.py`.
    """
    compared = {Path(choice).stem if are_files else choice: choice for choice in choices}
    near = difflib.get_close_matches(Path(name).stem if are_files else name, compared, n=1, cutoff=0.6)
    return f"Did you mean '{compared[near[0]]}'? " if near else ""


def known_settings(owner: str, names: Collection[str]) -> str:
    """The remedy for a setting that `owner` does not have."""
    return f"Settings of {owner}: {', '.join(names)}." if names else f"Leave it out: {owner} has no settings."
