"""The pool's side of its processes: begetting, talking to and ending them through the nursery."""

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection

from hybridflow.config.carried_code import imported_code
from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.resolve import labels_of
from hybridflow.rewards.runners.chunks import Chunk
from hybridflow.rewards.runners.memory import used_bytes
from hybridflow.rewards.runners.messages import COMMAND, Raised, Ready, Setup, Unusable

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a process may take to import the functions."""

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_SECONDS = 10.0


class PoolProcess:
    """One process: starting, then idle or busy with a chunk, until it is ended.

    `deadline` is when it must be ready, or have answered.
    """

    def __init__(self, nursery: "Nursery") -> None:
        self._nursery = nursery
        ours, theirs = socket.socketpair()
        self._id = nursery.command(b"S", 0, theirs)
        theirs.close()
        self.connection = Connection(ours.detach())
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False
        self.chunk: Chunk | None = None
        self._bytes_at_start = 0
        self._question = 0
        self._function = 0

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a chunk."""
        return self.is_ready and self.chunk is None

    def become_ready(self, code: dict[str, str]) -> None:
        """It has loaded the functions from this code; the memory that it takes from now on is theirs."""
        self._nursery.check_code(code)
        self.is_ready, self._bytes_at_start = True, used_bytes(self._id)

    def added_bytes(self) -> int:
        """Memory that it has come to use since it was ready."""
        return used_bytes(self._id) - self._bytes_at_start

    def give(self, chunk: Chunk, function: int, samples: Samples, *, seconds: float) -> None:
        """Gives it samples to score by one of the functions; should it be dead, `receive` says so."""
        self.chunk, self.deadline = chunk, time.monotonic() + seconds
        self._question, self._function = self._question + 1, function
        try:
            self.connection.send((self._question, function, samples))
        except OSError:
            logger.debug("a reward process died while idle")

    def receive(self) -> Ready | Raised | Outcome | None:
        """What it says; None when it is dead. Raises `RewardError` for anything but the answer to the last question."""
        try:
            said = self.connection.recv()
        except (EOFError, OSError):
            return None
        number, answer = said if isinstance(said, tuple) and len(said) == 2 else (None, said)
        if number != self._question:
            raise RewardError(
                f"The process of the reward function '{self._nursery.labels[self._function]}' sent answer {number}"
                f" where answer {self._question} was expected, so scores cannot be told apart.",
                remedy="Something that the function started writes to the connection of its process. Start programs"
                " with subprocess or multiprocessing, and end each process that os.fork() makes with os._exit().",
            )
        if isinstance(answer, Unusable):
            raise RewardError(
                f"A process of the pool cannot load the reward functions: {answer.reason}",
                remedy="Fix what keeps them from being imported there, or use reward.processes=0.",
            )
        assert isinstance(answer, Ready | Raised | Outcome), f"not an answer: {answer!r}"
        return answer

    def end(self) -> str:
        """Kills it, with all that it started; how it had ended, where it had."""
        status = self._nursery.command(b"E", self._id)
        self.connection.close()
        return _said_of(status)


class Nursery:
    """The process that begets the others. All of them end when it is closed, collected, or its owner dies."""

    def __init__(self, config: Reward) -> None:
        self._setup = Setup(config, [path for path in sys.path if path])
        self.labels = labels_of(config)
        self._code = imported_code()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._close = lambda: None

    def start(self) -> None:
        """Starts it, where it has not been."""
        if self._control is not None:
            return
        ours, theirs = socket.socketpair()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(self._setup.path)} | dict.fromkeys(_THREADS, "1")
        process = subprocess.Popen(
            [sys.executable, "-m", __name__.rpartition(".")[0] + ".nursery", str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # out of reach of a signal to this process's group, at which a run still saves
        )
        theirs.close()
        data = pickle.dumps(self._setup)
        ours.sendall(struct.pack("<q", len(data)) + data)
        self._control, self._process = ours, process
        self._close = weakref.finalize(self, _end, process, ours)

    def beget(self) -> PoolProcess:
        """A new process, starting."""
        return PoolProcess(self)

    def check_code(self, code: dict[str, str]) -> None:
        """Raises `RewardError` where a process has imported other code than this one, or than another of the pool."""
        changed = sorted(file for file, digest in code.items() if self._code.setdefault(file, digest) != digest)
        if changed:
            raise RewardError(
                f"A new process of the reward functions loaded code that has changed since the run began:"
                f" {', '.join(changed)}.",
                remedy="Restore the former contents and resume the run, or resume it with the present ones:"
                " trainer.resume_changed=accept.",
            )

    def command(self, letter: bytes, number: int, sent: socket.socket | None = None) -> int:
        """Sends a command; the number that it answers."""
        assert self._control is not None, "the nursery was not started"
        try:
            data = COMMAND.pack(letter, number)
            if sent is None:
                self._control.sendall(data)
            else:
                socket.send_fds(self._control, [data], [sent.fileno()])
            answer = self._control.recv(COMMAND.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if len(answer) < COMMAND.size:
            raise self._died()
        return COMMAND.unpack(answer)[1]

    def _died(self) -> RewardError:
        assert self._process is not None, "the nursery was not started"
        self.close()
        status = self._process.returncode
        if status == -signal.SIGKILL:
            remedy = "The kernel does so when memory runs out, as `dmesg` then says: lower reward.processes."
        elif status < 0:
            remedy = "Find out what sent the signal."
        else:
            remedy = "See above for what it wrote to stderr."
        return RewardError(
            f"The process that starts the processes of the reward functions {_said_of(status)}.",
            remedy=f"{remedy} The run can be resumed from its last checkpoint.",
        )

    def close(self) -> None:
        """Ends it, and with it all that it begot."""
        self._close()
        self._control = None


def _said_of(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
