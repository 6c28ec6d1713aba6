"""The pool's side of its processes: starting them through the fork server, talking to them, and ending them."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import TypeVar

import psutil

from hybridflow.config.carried_code import imported_code
from hybridflow.errors import HybridflowError, ProcessKilled, RewardError
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.runners import forkserver
from hybridflow.rewards.runners.chunks import Chunk
from hybridflow.rewards.runners.forkserver import Code, Setup

logger = logging.getLogger(__name__)

Config = TypeVar("Config")

START_SECONDS = 120.0
"""How long a process may take to import the functions."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_SECONDS = 10.0


class ServedProcess:
    """A process that the fork server forks, and that answers on `connection` until it is ended.

    `deadline` is when it must be ready or have replied.
    """

    def __init__(self, server: "ForkServer") -> None:
        self._server = server
        ours, theirs = socket.socketpair()
        with theirs:
            self._id = server.request(forkserver.FORK, theirs)
        self.connection = Connection(ours.detach())
        self.deadline = time.monotonic() + START_SECONDS

    def end(self) -> str:
        """Kills it and everything it started; returns how it ended, such as 'exited with status 1'."""
        status = self._server.request(self._id)
        self.connection.close()
        return _ending(status)


class PoolProcess(ServedProcess):
    """A process of the reward pool: it loads the functions, then is idle or busy with a chunk until it is ended."""

    def __init__(self, server: "ForkServer") -> None:
        super().__init__(server)
        self.is_ready = False
        self.chunk: Chunk | None = None
        self._bytes_at_start = 0
        self._number = 0
        self._function = 0

    @property
    def is_idle(self) -> bool:
        """Whether it can take a chunk."""
        return self.is_ready and self.chunk is None

    def become_ready(self, code: Code) -> None:
        """Marks the functions as loaded, from this code; memory used after this call counts as theirs."""
        self._server.check_code(code)
        self.is_ready, self._bytes_at_start = True, used_bytes(self._id)

    def added_bytes(self) -> int:
        """Memory used in addition to what it used when it became ready."""
        return used_bytes(self._id) - self._bytes_at_start

    def send(self, chunk: Chunk, function: int, samples: Samples, *, allowed_failures: int, seconds: float) -> None:
        """Sends samples to be scored by one of the functions; if the process is dead, `receive` returns None."""
        self.chunk, self.deadline = chunk, time.monotonic() + seconds
        self._number, self._function = self._number + 1, function
        try:
            self.connection.send((self._number, function, samples, allowed_failures))
        except OSError:
            logger.debug("a reward process died while idle")

    def receive(self) -> Code | Outcome | None:
        """The reply to the last request; None if the process is dead. Raises `RewardError` for any other message."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return None
        number, reply = message if isinstance(message, tuple) and len(message) == 2 else (None, message)
        if number != self._number:
            raise RewardError(
                f"The process of the reward function '{self._server.labels[self._function]}' sent reply {number}"
                f" instead of reply {self._number}, so its scores cannot be assigned to samples.",
                remedy="Something that the function started writes to the connection of its process. Start programs"
                " with subprocess or multiprocessing, and end each process that os.fork() makes with os._exit().",
            )
        if isinstance(reply, str):
            raise RewardError(
                f"A process of the pool cannot load the reward functions: {reply}",
                remedy="Make them importable in a new process, or use reward.processes=0.",
            )
        assert isinstance(reply, Outcome if number else dict), f"not a reply: {reply!r}"
        return reply


class ForkServer:
    """The process that forks the others. All of them end when it is closed or collected, or when its owner dies."""

    def __init__(
        self,
        serve: Callable[[Connection, Config], None],
        config: Config,
        *,
        labels: Sequence[str],
        of: str = "reward functions",
        setting: str = "reward.processes",
        error: type[HybridflowError] = RewardError,
    ) -> None:
        """Processes call `serve(connection, config)`. In errors, `of` is what they run, and `setting` their number."""
        self._setup = Setup(serve, config, [path for path in sys.path if path])
        self.labels = [*labels]
        self._of, self._setting, self._error = of, setting, error
        self._code = imported_code()
        self._control: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._close = lambda: None

    def start(self) -> None:
        """Starts the server unless it runs."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {forkserver.__name__} import main; main({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(self._setup.path)} | dict.fromkeys(_THREADS, "1"),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a signal to this process's group must not end it: scores may still be needed
            )
        self._control, self._process = Connection(ours.detach()), process
        self._control.send(self._setup)
        self._close = weakref.finalize(self, _close, process, self._control)

    @property
    def is_running(self) -> bool:
        """Whether it has started, and has neither been closed nor been found dead."""
        return self._control is not None

    def close(self) -> None:
        """Ends the server and its processes, if it runs."""
        self._close()
        self._control = None

    def check_code(self, code: Code) -> None:
        """Raises an error if a process imported other code than this process or another process of the pool."""
        changed = sorted(file for file, digest in code.items() if self._code.setdefault(file, digest) != digest)
        if changed:
            raise self._error(
                f"A new process of the {self._of} loaded code that has changed since the run began:"
                f" {', '.join(changed)}.",
                remedy="Restore the former contents and resume the run, or resume with the new ones:"
                " trainer.resume_changed=accept.",
            )

    def request(self, number: int, sent: socket.socket | None = None) -> int:
        """Sends `FORK` with a socket for the new process, or the id of a process to end; returns the reply."""
        assert self._control is not None, "the fork server was not started"
        try:
            self._control.send(number)
            if sent is not None:
                send_handle(self._control, sent.fileno(), None)
            return self._control.recv()
        except (EOFError, OSError):
            raise self._died() from None
        except BaseException:  # an interruption: the next request would read this one's reply
            self.close()
            raise

    def _died(self) -> HybridflowError:
        assert self._process is not None, "the fork server was not started"
        self.close()
        status, kind = self._process.returncode, ProcessKilled
        if status == -signal.SIGKILL:
            remedy = f"The kernel does so when memory runs out (see `dmesg`): lower {self._setting}."
        elif status < 0:
            remedy = "Find out what sent the signal."
        else:
            remedy, kind = "See above for what it wrote to stderr.", self._error
        return kind(
            f"The fork server of the {self._of} {_ending(status)}.",
            remedy=f"{remedy} The run can be resumed from its last checkpoint.",
        )


def used_bytes(process: int) -> int:
    """Memory of a process and its descendants that no file backs; reserved but untouched pages do not count.

    0 for a process that has ended. Without /proc: the resident memory of the process alone, from psutil.
    """
    if sys.platform != "linux":
        return psutil.Process(process).memory_info().rss if psutil.pid_exists(process) else 0
    total, waiting = 0, [process]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            total += int(resident) - int(shared)
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile, or this kernel does not list children
    return total * os.sysconf("SC_PAGE_SIZE")


def _ending(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


FROM_OUTSIDE = (_ending(-signal.SIGKILL), _ending(-signal.SIGTERM))
"""How processes end that the kernel, for lack of memory, or a person ends."""


def _close(process: subprocess.Popen[bytes], control: Connection) -> None:
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
