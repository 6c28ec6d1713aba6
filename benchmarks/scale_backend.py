"""The backend of scale.py: the controller's messages to the ranks, sent to one process that plays them all.

Everything above the backend is the real controller: dispatch, partition, references, futures and the call log. Each
rank gets a message of its own, pickled separately, and each answer is unpickled, as between processes. Messages and
answers are counted in bytes.
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import cast

from record import environment

from hybridflow.controller.backends.interface import Arguments, Broken, Handle, Pending, Stored
from hybridflow.controller.call_log import CallLog
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.controller.worker import WorkerSpec
from hybridflow.controller.worker_host import VALUE, AnswerForm
from hybridflow.observability.calls import Span

WORKERS = Path(__file__).with_name("scale_workers.py")
_MOST_FREED = 4096
_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.05
_SIZE_BYTES = 4
"""The length of the size that `Connection.send_bytes` sends before each message of less than 2 GB."""


class Reference:
    """An object of the other process, which forgets it when the last reference to it ends.

    `number` is that of the call or put that made it.
    """

    __slots__ = ("_freed", "number")

    def __init__(self, number: int, freed: list[int]) -> None:
        self.number = number
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.number)


class CrowdBackend:
    """Ranks of one other process. `sent_bytes` and `received_bytes` count what passes through the driver."""

    def __init__(self) -> None:
        self.call_log = CallLog()
        self.sent_bytes = self.received_bytes = self.num_messages = 0
        self._number = 0
        self._calls: dict[int, Pending] = {}
        self._freed: list[int] = []
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        with Listener(address) as listener:
            self._process = subprocess.Popen([sys.executable, str(WORKERS), address], env=environment())
            self._connection: Connection = listener.accept()
        self._incoming = socket.socket(fileno=os.dup(self._connection.fileno()))
        self._inbox, self._unread = bytearray(), deque[bytes]()

    def spawn(self, spec: WorkerSpec, pool: ResourcePool) -> list[Handle]:
        """Starts one stand-in per device of the pool."""
        self._send("spawn", pool.name, pool.devices, spec)
        return [Handle(spec.role, spec.role, rank, pool, None) for rank in range(pool.devices)]

    def call(
        self, handle: Handle, method: str, arguments: Arguments, form: AnswerForm = VALUE, number: int = 0
    ) -> Pending:
        """Sends the call to the rank."""
        self._number += 1
        sent = time.time()
        stored: tuple[Reference, ...] = arguments.stored  # type: ignore[assignment]
        taken = [each.number for each in stored]
        place = (handle.pool.name, handle.rank)
        self._send("call", self._number, *place, arguments.request(handle, method, form), taken)
        packet = Reference(self._number, self._freed) if form.objects > 1 else None
        pending = Pending(handle, method, self._number, packet, changes=form.changes, number=number, sent=sent)
        self._calls[self._number] = pending
        return pending

    def wait(self, pending: Sequence[Pending]) -> list[object]:
        """The values of some calls, whose answers are unpickled once all are here, as Ray does.

        The other process answers calls in order.
        """
        awaited = {id(call) for call in pending if not call.done}
        places = [place for place, call in enumerate(self._calls.values()) if id(call) in awaited]
        while places and len(self._unread) <= places[-1]:
            self._read()
        self._note_answers()
        self.call_log.read(call.number for call in pending)
        return [call.value for call in pending]

    def check_alive(self, handles: Sequence[Handle]) -> None:
        """They have not ended."""

    def has_ended(self, pending: Sequence[Pending]) -> bool:
        """Whether all these calls have been answered."""
        while self._read(waits=False):
            pass
        self._note_answers()
        return all(call.done for call in pending)

    def put(self, value: object) -> Stored:
        """Sends a value to the other process."""
        self._number += 1
        self._send("put", self._number, value)
        return Reference(self._number, self._freed)

    def get(self, stored: Sequence[Stored]) -> list[object]:
        """Values from the other process."""
        self.wait(list(self._calls.values()))
        self._send("get", [cast(Reference, value).number for value in stored])
        return cast(list, self._receive())

    def stored(self) -> tuple[int, int]:
        """The number of objects that the other process keeps, and their bytes."""
        self.wait(list(self._calls.values()))
        self._free()
        self._send("count")
        return cast(tuple[int, int], self._receive())

    def drain_calls(self) -> list[Span]:
        """The calls that have ended since the last drain."""
        self.has_ended([])
        return self.call_log.drain()

    def mark(self) -> None:
        """Does nothing: no step is abandoned."""

    def finish_updates(self) -> None:
        """Waits for all calls."""
        self.wait([*self._calls.values()])

    def is_changing(self) -> bool:
        """False: no step is abandoned."""
        return False

    def abandon(self, seconds: float) -> bool:
        """False: no step is abandoned."""
        return False

    def broken(self, seconds: float) -> Broken:
        """No pool is."""
        return Broken(frozenset(), is_unchanged=True)

    def respawn(self, pools: Collection[str]) -> None:
        """Does nothing."""

    def devices(self) -> list[int]:
        """One node."""
        return [1]

    def kill(self, handles: Sequence[Handle]) -> None:
        """Does nothing: all ranks end together."""

    def shutdown(self) -> None:
        """Ends the other process."""
        self._send("end")
        self._process.wait(timeout=60.0)
        self._connection.close()
        self._incoming.close()
        self._folder.cleanup()

    def _send(self, *message: object) -> None:
        if len(self._freed) > _MOST_FREED:
            self._free()
        data = pickle.dumps(message, protocol=5)
        self.sent_bytes += len(data)
        self.num_messages += 1
        self._connection.send_bytes(data)

    def _free(self) -> None:
        freed, self._freed[:] = list(self._freed), []
        self._connection.send_bytes(pickle.dumps(("forget", freed), protocol=5))

    def _receive(self) -> object:
        """The next message that is not an answer to a call."""
        while not self._unread:
            self._read()
        return pickle.loads(self._unread.popleft())

    def _read(self, *, waits: bool = True) -> bool:
        """Reads what the other process has sent, if anything; waits in periods, so that many messages come at once."""
        while not (data := self._sent()) and waits:
            time.sleep(_LOOK_SECONDS)
        self._inbox += data
        start = 0
        while len(self._inbox) >= (first := start + _SIZE_BYTES):
            end = first + int.from_bytes(self._inbox[start:first], "big")
            if len(self._inbox) < end:
                break
            self._unread.append(bytes(self._inbox[first:end]))
            self.received_bytes += end - first
            start = end
        del self._inbox[:start]
        return bool(data)

    def _sent(self) -> bytes:
        """Bytes that the other process has sent; empty if there are none."""
        try:
            data = self._incoming.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not data:
            self._note_answers()
            raise EOFError("the stand-ins have ended")
        return data

    def _note_answers(self) -> None:
        """Unpickles and notes all answers that are here, as `Watch` does for Ray."""
        now = time.time()
        while self._unread:
            number, answer = pickle.loads(self._unread.popleft())
            if number == "failed":
                raise RuntimeError(f"a stand-in has failed:\n{answer}")
            call = self._calls.pop(number)
            call.done = True
            call.value, *measured = answer
            self.call_log.answered(call.number, call.handle.rank, measured, node="node", sent=call.sent, now=now)
