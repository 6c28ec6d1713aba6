"""A process that begets the processes of a pool, and takes them with it when its own parent is gone.

Run as `python -m hybridflow.rewards.runners.nursery FD`, where FD is a socket to the pool: first a length and that
many bytes, a pickled `Setup`; then commands of 5 bytes each. It stays small and has one thread, so that forking it is
cheap and safe; functions are imported in the forked processes, never here.
"""

import ctypes
import importlib.util
import os
import pickle
import signal
import socket
import struct
import sys
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection

from hybridflow.config.carried_code import imported_code
from hybridflow.errors import ConfigError, RewardError, RewardUnavailable
from hybridflow.observability.lasting import lasting
from hybridflow.rewards.interface import Samples
from hybridflow.rewards.outcomes import checked, trace_of
from hybridflow.rewards.resolve import resolve_functions
from hybridflow.rewards.runners.messages import COMMAND, Answer, Raised, Ready, Setup, Unusable

_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(descriptor: int) -> None:
    """Obeys the pool until it is gone."""
    # The pool's process decides what a signal to every process of a job means: it may still need scores, to save.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=descriptor)
    (size,) = struct.unpack("<q", _received(control, 8))
    setup: Setup = pickle.loads(_received(control, size))
    living: set[int] = set()
    try:
        while command := _command(control):
            letter, number, descriptors = command
            if letter == b"S":
                answer = _begotten(control, descriptors[0], setup)
                living.add(answer)
            else:
                living.discard(number)
                answer = _ended(number)
            if not _is_sent(control, COMMAND.pack(letter, answer)):
                return
    finally:
        for process in living:
            _ended(process)


def _command(control: socket.socket) -> tuple[bytes, int, list[int]] | None:
    """The next command's letter and number, and the descriptors sent with it; None once the pool is gone."""
    try:
        data, descriptors, *_ = socket.recv_fds(control, COMMAND.size, 1)
        data += _received(control, COMMAND.size - len(data))
    except OSError:
        return None
    return (*COMMAND.unpack(data), descriptors)


def _is_sent(control: socket.socket, data: bytes) -> bool:
    try:
        control.sendall(data)
    except OSError:
        return False
    return True


def _received(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = control.recv(size - len(data))
        if not part:
            raise OSError("the pool is gone")
        data += part
    return data


def _begotten(control: socket.socket, descriptor: int, setup: Setup) -> int:
    nursery = os.getpid()
    process = os.fork()
    if process:
        os.close(descriptor)
        return process
    status = 1
    try:
        control.close()
        os.setsid()  # what the functions start themselves ends with the group
        _die_with(nursery)
        for number in _IGNORED:  # programs that the functions start would inherit it
            signal.signal(number, signal.SIG_DFL)
        with redirect_stdout(lasting(sys.stdout, by_lines=True)), redirect_stderr(lasting(sys.stderr)):
            _serve(Connection(descriptor), setup)
        status = 0
    finally:
        os._exit(status)


def _ended(process: int) -> int:
    """Kills a process and what it started; the status it ended with, negative for a signal."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # it has not come to lead its group yet
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _die_with(parent: int) -> None:
    """The kernel kills this process when its parent is gone, whatever it is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _serve(connection: Connection, setup: Setup) -> None:
    sys.path[:] = setup.path
    importlib.invalidate_caches()
    try:
        functions = resolve_functions(setup.config)
    except ConfigError as error:
        connection.send((0, Unusable(error.message)))
        return
    connection.send((0, Ready(imported_code())))
    while True:
        try:
            number, index, samples = connection.recv()
        except EOFError:
            return
        assert isinstance(samples, Samples)
        function = functions[index]
        try:
            answer: Answer = checked(function, samples, function(samples))
        except RewardError as error:
            answer = Raised(error.message, trace_of(error), isinstance(error, RewardUnavailable))
        sys.stdout.flush()  # the process is killed in the end, with what it has not yet written
        connection.send((number, answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
