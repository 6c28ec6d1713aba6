"""Deaths on demand, for tests: a process kills itself at a named moment.

    HYBRIDFLOW_KILL_AT=before_rename:3

makes a process send itself SIGKILL when it comes to the point `before_rename` for the third time (without `:3`, the
first). Without the variable a point costs one look into the environment, and nothing else ever happens there.
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
"""In the order in which saving a checkpoint passes them; `step_done` is for the loop, after each training step."""

_passed: Counter[str] = Counter()


def fault_point(name: str) -> None:
    """Die here, if the environment says so."""
    assert name in POINTS, f"'{name}' is not in POINTS"
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return
    _passed[name] += 1
    point, _, count = wanted.partition(":")
    if point == name and _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
