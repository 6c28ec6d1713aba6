"""How a process of the package starts and ends quickly: imports without garbage collection, an exit without a teardown.

With torch and transformers loaded, the interpreter holds a million objects that live as long as the process. While they
are imported, the collector takes a fifth of the time and finds nothing; at the exit, freeing them takes a second.
"""

import atexit
import ctypes
import gc
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_OUTERMOST = {"__main__", "hybridflow.cli.main", "runpy"}
"""Modules whose code runs when a process runs a command of the package."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""The signals that stop a command. SIGUSR1 is a notice that the job is about to end, as batch systems send it."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl.h

_NEW_OBJECTS = 10_000
"""The newest objects are examined for garbage after so many; Python's default is 700 to 2,000."""

STATUS_AFTER_NOTICE = 75
"""EX_TEMPFAIL of sysexits.h: not done, and the same command may be run again."""


def status_after(number: int) -> int:
    """The exit status of a command that a signal has stopped: 128 + its number, except 75 for SIGUSR1."""
    return STATUS_AFTER_NOTICE if number == signal.SIGUSR1 else 128 + number


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent ends, such as daemons; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ends_with(parent: int) -> bool:
    """Makes the kernel send this process SIGTERM when its parent ends; returns False if it has ended. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


@contextmanager
def uncollected() -> Iterator[None]:
    """A block for imports and the start of large libraries, without garbage collection.

    If the block calls `gc.collect()`, as the start of vLLM does, only its own objects are examined.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        with frozen():
            yield
    finally:
        if is_enabled:
            gc.enable()


def num_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def frozen() -> Iterator[None]:
    """A block in which the objects that exist already are not examined for garbage, and others less often.

    The driver of many ranks makes hundreds of thousands of objects per step, most of which last until the step ends.
    With Python's default, which examines all objects after 70,000 new ones, a fifth of its time was spent on that.
    """
    is_frozen, thresholds = gc.get_freeze_count() > 0, gc.get_threshold()
    gc.freeze()
    if thresholds[0]:  # with 0, collection is off
        gc.set_threshold(max(thresholds[0], _NEW_OBJECTS), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_frozen:
            gc.unfreeze()


def end(status: int) -> NoReturn:
    """Like `sys.exit(status)`, except that the process then ends without freeing its memory object by object.

    Threads are awaited, functions registered with `atexit` run, and open files are written, as in any other exit. It is
    exactly `sys.exit` if other code has called the command, and may catch the exception.
    """
    callers, frame = set(), sys._getframe(1)
    while frame is not None:
        callers.add(frame.f_globals["__name__"])
        frame = frame.f_back
    if callers <= _OUTERMOST:
        atexit.register(leave, status)
    sys.exit(status)


def leave(status: int) -> None:
    """Ends the process after the functions registered with `atexit`; returns if the output cannot be written."""
    atexit.unregister(leave)
    atexit._run_exitfuncs()  # the others; multiprocessing ends its processes in the same way
    _write_open_files()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # none, or nobody reads it: the interpreter knows what to do
        return
    ctypes.CDLL(None).fflush(None)
    os._exit(status)


def _write_open_files() -> None:
    """Writes what files hold that nobody has closed, which the interpreter does when it frees them."""
    (base,) = io.IOBase.__bases__
    files = [found for found in gc.get_objects() if issubclass(type(found), base)]
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):  # text, then the bytes under it
        with suppress(Exception):
            file.flush() if type(file).__module__ == "_io" else file.close()
