"""The kinds of faults, how they are recognized, and what a run does after each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hybridflow.config.section import Section


class FaultPolicy(Enum):
    """How a run responds to a fault."""

    retry = "retry"
    respawn = "respawn"
    roll_back = "roll_back"
    stop = "stop"


@dataclass
class Faults(Section):
    """Policies by kind of fault. retry repeats the step; respawn starts new processes and repeats the step; roll_back
    returns to an earlier state and leaves out the batch of the step; stop ends the run."""

    user_code: FaultPolicy = FaultPolicy.stop
    """Errors of reward functions, losses, dataflows and engines: retry, roll_back or stop."""

    data: FaultPolicy = FaultPolicy.stop
    """Rows and batches that cannot be used: roll_back or stop."""

    numeric: FaultPolicy = FaultPolicy.stop
    """Numbers that are not finite, or for which a guard has `action=fault`: roll_back or stop."""

    memory: FaultPolicy = FaultPolicy.respawn
    """Processes that run out of memory (respawn on Ray only): respawn or stop."""

    process: FaultPolicy = FaultPolicy.respawn
    """Processes that are killed or crash (on Ray): respawn or stop."""

    lost_node: FaultPolicy = FaultPolicy.respawn
    """Nodes, or outputs of calls, that are lost (on Ray); their processes start where there is room: respawn or
    stop."""

    storage: FaultPolicy = FaultPolicy.stop
    """Files that cannot be read or written: retry or stop."""

    hang: FaultPolicy = FaultPolicy.respawn
    """Processes that make no progress (on Ray): respawn or stop."""


MOST_IN_STEP = 3
"""The number of faults in one step that a run survives."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    name: str
    """The field of `Faults` with its policy."""

    errors: Sequence[str]
    """Names of exception classes; subclasses are included."""

    policies: Sequence[FaultPolicy]
    """The policies that can handle it."""

    most_in_step: int = MOST_IN_STEP
    """The number of faults of this kind in one step that a run survives."""


_RETRY, _RESPAWN, _ROLL_BACK, _STOP = FaultPolicy
KINDS = (
    Kind("hang", ["WorkerHangs"], [_RESPAWN, _STOP]),
    Kind("memory", ["WorkerOutOfMemory", "OutOfMemoryError", "MemoryError"], [_RESPAWN, _STOP], most_in_step=1),
    Kind("lost_node", ["NodeLost", "ClusterLost", "OutputLost"], [_RESPAWN, _STOP]),
    Kind("process", ["WorkerDied", "ProcessKilled"], [_RESPAWN, _STOP]),
    Kind("numeric", ["NumericError"], [_ROLL_BACK, _STOP]),
    Kind("data", ["DataError", "BatchError", "UnicodeError"], [_ROLL_BACK, _STOP]),
    Kind("storage", ["CheckpointError", "ResourceError", "OSError"], [_RETRY, _STOP]),
    Kind("user_code", ["Exception"], [_RETRY, _ROLL_BACK, _STOP]),
)
"""All kinds; the first whose errors include a fault is its kind."""

NEVER_SURVIVED = frozenset({"ClusterLost", "ConfigError", "MissingExtraError"})
"""Exception classes after which a run ends, whatever the policy: nothing could run, or it would fail again."""
