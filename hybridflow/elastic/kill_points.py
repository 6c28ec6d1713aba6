"""Fault injection for tests: a process kills itself at a named point.

With HYBRIDFLOW_KILL_AT=before_rename:3 in its environment, a process sends itself SIGKILL when it reaches the point
`before_rename` for the third time (without `:3`, the first). Otherwise a point does nothing.
"""

import os
import signal
from collections import Counter

VARIABLE = "HYBRIDFLOW_KILL_AT"
POINTS = (
    "write_begun",
    "parts_written",
    "before_manifest",
    "before_flush",
    "before_rename",
    "between_renames",
    "after_rename",
    "before_delete",
    "during_delete",
    "step_done",
)
"""In the order in which saving a checkpoint reaches them; `step_done` comes after each training step."""

_passed: Counter[str] = Counter()


def kill_point(name: str) -> None:
    """Kills this process if HYBRIDFLOW_KILL_AT names this point."""
    assert name in POINTS, f"'{name}' is not in POINTS"
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    _passed[name] += 1
    point, _, count = wanted.partition(":")
    if point == name and _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
