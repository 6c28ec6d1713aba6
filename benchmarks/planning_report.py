"""A table of published numbers next to predictions, and criteria that the predictions meet or miss."""

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Criterion(NamedTuple):
    """Something that must hold for the rows of a section."""

    name: str
    found: str
    """`28 of 29`: the number that decides."""

    is_met: bool


class Section(NamedTuple):
    """One table."""

    title: str
    lines: Sequence[str]
    criteria: Sequence[Criterion]


def shown(sections: Iterable[Section]) -> str:
    """The tables as text, each followed by its criteria."""
    parts = []
    for section in sections:
        verdicts = [f"{'pass' if each.is_met else 'FAIL'}  {each.name}: {each.found}" for each in section.criteria]
        parts.append("\n".join([section.title, *section.lines, *verdicts]))
    return "\n\n".join(parts) + "\n"


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, ties sharing their mean rank."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values
    ]
