"""The colors of roles in drawings, on light and dark backgrounds: the same in `hybridflow show` and in the report."""

from collections.abc import Iterable

LIGHT = ("#0b7d72", "#9a5b00", "#6d3fc4", "#1d56b8", "#3c7a1f", "#b3263f")
DARK = ("#3fc5b5", "#e9a845", "#ab8bf5", "#6ba1f7", "#86c96a", "#f0798c")


def role_colors(roles: Iterable[str]) -> dict[str, int]:
    """The number of each role's color, in the order in which the roles are first called; a seventh has the first's."""
    return {name: number % len(LIGHT) for number, name in enumerate(dict.fromkeys(roles))}
