"""One colour a role, the same in the terminal and on a page."""

from collections.abc import Mapping, Sequence

from hybridflow.graph.trace import TracedCall, TracedRole

TERMINAL = ("cyan", "yellow", "magenta", "blue", "green", "red")
LIGHT = ("#0b7d72", "#9a5b00", "#6d3fc4", "#1d56b8", "#3c7a1f", "#b3263f")
DARK = ("#3fc5b5", "#e9a845", "#ab8bf5", "#6ba1f7", "#86c96a", "#f0798c")


def ordered_roles(calls: Sequence[TracedCall]) -> list[str]:
    """Names of the roles that are called, pool by pool, in the order of their first calls."""
    pools = {call.role: call.pool for call in calls}
    order = list(dict.fromkeys(call.pool for call in calls))
    return sorted(pools, key=lambda name: order.index(pools[name]))


def colour_numbers(roles: Sequence[TracedRole], calls: Sequence[TracedCall]) -> Mapping[str, int]:
    """Which of the colours each role has: that of its place among the roles that are called."""
    called = dict.fromkeys([*(call.role for call in calls), *(role.name for role in roles)])
    return {name: number % len(TERMINAL) for number, name in enumerate(called)}
