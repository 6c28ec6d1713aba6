"""One row of the table of algorithms."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One row: what it is called, where it comes from, and how it is run."""

    name: str
    synonyms: tuple[str, ...]
    source: str
    place: str
    """`file:function`, in the package."""

    command: str
    needs: tuple[str, ...]
    settings: Mapping[str, object]
    """Keys of the configuration that it reads, with what they are."""
