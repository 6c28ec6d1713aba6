"""A failure inside a worker, on its way to the driver."""

import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from hybridflow.errors import HybridflowError, WorkerError

_ROOM = str(Path(__file__).parent)
_REMEDY = "The last line of the worker's traceback is the one that failed."


@dataclass(frozen=True)
class Place:
    """Where a call runs."""

    role: str
    rank: int
    node: str
    method: str


class CallFailed(Exception):
    """Carries a worker's error, and its cause where it is one of the house's, out of the worker's process."""

    def __init__(self, error: WorkerError, cause: HybridflowError | None) -> None:
        super().__init__(error, cause)
        self.error = error
        self.cause = cause


def call_failed(error: BaseException, place: Place) -> CallFailed:
    """What a worker raises for an exception in one of its methods: message, remedy and traceback, all as text."""
    cause = error if isinstance(error, HybridflowError) else None
    message = cause.message if cause else str(error)
    first_line = f"{place.role}.{place.method} failed: {type(error).__name__}: {message}".rstrip(": ")
    worker_error = WorkerError(
        first_line,
        remedy=cause.remedy if cause else _REMEDY,
        role=place.role,
        rank=place.rank,
        node=place.node,
        method=place.method,
        worker_traceback="".join(traceback.format_exception(type(error), error, _own_frames(error.__traceback__))),
    )
    return CallFailed(worker_error, cause)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the worker's own code on: without the frames of this room that led there."""
    inner = frames
    while inner is not None and str(Path(inner.tb_frame.f_code.co_filename).parent).startswith(_ROOM):
        inner = inner.tb_next
    return inner or frames
