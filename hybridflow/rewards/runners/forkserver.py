"""The fork server of the processes that run user code, and the loop in which those of the reward pool score samples.

The server is a clean process with one thread and few modules, so forking it is cheap and safe. User code is imported
only in the forked processes. It ends when the pool's process ends, and takes the forked processes with it.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import psutil

from hybridflow.config.carried_code import imported_code
from hybridflow.config.reward import Reward
from hybridflow.errors import ConfigError
from hybridflow.observability.logs import lasting
from hybridflow.process import STOP_SIGNALS, adopt_orphans
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.serial import outcome_of
from hybridflow.rewards.sandbox.jail import die_with

FORK = 0
"""Request to fork a process, followed by the descriptor of its connection; the reply is its process id. A request with
a process id ends that process; the reply is its exit status."""


@dataclass(frozen=True)
class Setup:
    """A module-level function that serves a connection in each process, its configuration, and `sys.path`."""

    serve: Callable[[Connection, Any], None]
    config: object
    path: list[str]


Code = dict[str, str]
"""The SHA-256 of each user file that was imported."""


def main(descriptor: int) -> None:
    """Serves requests on a connected socket until the pool disconnects."""
    # The pool's process handles signals to its process group: it may still need scores until it has saved.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()  # of processes that ended by themselves
    children: set[int] = set()
    with Connection(descriptor) as control:
        try:
            setup: Setup = control.recv()
            while True:
                request = control.recv()
                if request == FORK:
                    reply = _forked(recv_handle(control), control, setup)
                    children.add(reply)
                else:
                    children.remove(request)
                    reply = _ended(request, children)
                control.send(reply)
        except (EOFError, ConnectionError):
            pass  # the pool has ended
        finally:
            for process in children:
                _ended(process, children)


def _forked(descriptor: int, control: Connection, setup: Setup) -> int:
    """Forks a process that serves the connection; returns its process id."""
    server = os.getpid()
    process = os.fork()
    if process:
        os.close(descriptor)
        return process
    status = 1
    try:
        control.close()
        os.set_inheritable(descriptor, False)  # a daemon that holds it would hide that this process has ended
        os.setsid()  # so that killing the process group also kills what the functions start
        die_with(server)
        adopt_orphans()  # so that daemons end with it
        for number in STOP_SIGNALS:  # programs that the functions start would inherit SIG_IGN
            signal.signal(number, signal.SIG_DFL)
        with redirect_stdout(lasting(sys.stdout, by_lines=True)), redirect_stderr(lasting(sys.stderr)):
            sys.path[:] = setup.path
            importlib.invalidate_caches()
            setup.serve(Connection(descriptor), setup.config)
        status = 0
    finally:
        os._exit(status)


def _ended(process: int, others: set[int]) -> int:
    """Kills a process and what it started; returns its exit status, negative for a signal. `others` keep running."""
    _kill_descendants(process)
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # it has not called setsid yet
        os.kill(process, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    for orphan in psutil.Process().children():
        if orphan.pid not in others:
            _kill_descendants(orphan.pid)
            with suppress(psutil.Error):
                orphan.kill()
                os.waitpid(orphan.pid, 0)
    return status


def _kill_descendants(process: int) -> None:
    """Kills what a process started, in sessions of its own too."""
    with suppress(psutil.NoSuchProcess):
        for started in psutil.Process(process).children(recursive=True):
            with suppress(psutil.Error):
                started.kill()


def serve_functions(connection: Connection, config: Reward) -> None:
    """Loads the functions, and replies with their code or the reason why not; then scores samples until disconnected.

    Each reply is sent in a pair with the number of its request: 0 for loading, then 1, 2, ...
    """
    try:
        functions = resolve_functions(config)
    except ConfigError as error:
        connection.send((0, error.message))
        return
    connection.send((0, imported_code()))
    while True:
        try:
            number, index, samples, allowed_failures = connection.recv()
        except EOFError:
            return
        assert isinstance(samples, Samples)
        outcome = outcome_of(functions[index], samples, allowed_failures)
        sys.stdout.flush()  # the process will be killed with whatever is still in its buffer
        connection.send((number, outcome))
