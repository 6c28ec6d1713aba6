"""Work on rows that may never end, such as a model's own chat template, in a process that can be stopped."""

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import psutil

from hybridflow.errors import DataError, HybridflowError

T = TypeVar("T")
R = TypeVar("R")

ROW_SECONDS = 20.0
"""Time limit per row. Rendering takes less than a thousandth of it on a slow machine."""

MEMORY_BYTES = 2 << 30
"""Memory that the process may allocate in addition to what it starts with."""


def watched(work: Callable[[T], R], rows: Sequence[T], *, what: str, remedy: str, seconds: float) -> list[R]:
    """Calls `work` on each row in a forked process, which is killed if a row takes too long or too much memory.

    `what` is the beginning of the error message in that case. Errors of `work` are raised here as `DataError`. Results
    cross a pipe as JSON, so that nothing that the rows make of that process is unpickled here; tuples become lists.
    """
    if not rows:
        return []
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        receiver.close()
        _work(work, rows, sender)
    sender.close()
    try:
        return list(_answers(receiver, len(rows), seconds, what, remedy))
    finally:
        receiver.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _answers(receiver: Connection, count: int, seconds: float, what: str, remedy: str) -> Iterator:
    for row in range(1, count + 1):
        if not receiver.poll(seconds):
            raise DataError(f"{what} row {row} and did not end in {seconds:g} seconds.", remedy=remedy)
        try:
            answer = json.loads(receiver.recv_bytes())
        except (EOFError, ValueError) as error:
            message = f"{what} row {row} and took more than {MEMORY_BYTES >> 20} MB of memory, or crashed."
            raise DataError(message, remedy=remedy) from error
        if "error" in answer:
            raise DataError(answer["error"], remedy=answer["remedy"])
        yield answer["result"]


def _work(work: Callable[[T], R], rows: Sequence[T], sender: Connection) -> NoReturn:
    """The forked process: sends one answer per row, and exits without the parent's exit handlers."""
    try:
        limit = psutil.Process().memory_info().vms + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for row in rows:
            sender.send_bytes(json.dumps(_answer(work, row)).encode())
    finally:
        os._exit(0)


def _answer(work: Callable[[T], R], row: T) -> dict[str, R | str]:
    try:
        return {"result": work(row)}
    except HybridflowError as error:
        return {"error": error.message, "remedy": error.remedy}
