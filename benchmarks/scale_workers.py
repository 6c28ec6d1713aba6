"""Stand-in workers for scale.py: any number of ranks in one process, which answers every call at once.

The driver sends this process the messages that it would send to as many processes: one per rank and call. Arguments are
unpickled, portions assembled and answers summarized by the real `WorkerHost`; only the methods are replaced. Started by
`scale_backend.py`, with the address of its socket.
"""

import json
import logging
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache, partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import get_type_hints

import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller.packets import Packet
from hybridflow.controller.transfer import specs_of
from hybridflow.controller.worker import Worker, WorkerContext, WorkerSpec
from hybridflow.controller.worker_host import Request, WorkerHost
from hybridflow.graph.stand_in import made_up
from hybridflow.observability.metrics import Metrics, maximum, mean, total
from hybridflow.parallel.file_records import record_files
from hybridflow.parallel.part_records import FOLDER

SHORTEST_RESPONSE, LONGEST_RESPONSE = 1, 16
NUM_METRICS = 24
"""About as many as an update of the actor returns."""

PART_BYTES = 1024


class Instant(Worker):
    """Answers every call of the worker class that it plays, with columns, metrics or files of the right form."""

    def __init__(self, context: WorkerContext, *, plays: type[Worker]) -> None:
        super().__init__(context)
        self._plays = plays
        self._specs = specs_of(plays)
        self._num_answers = 0

    def save(self, directory: Path, in_background: bool = False) -> None:
        """Writes a small part of a checkpoint, and the record that `PartWriter` would write of it.

        The threads of `PartWriter` wait for one another by polling, which a thousand ranks of one process would notice.
        """
        context = self.context
        target, records = directory / context.role, directory / FOLDER
        target.mkdir(exist_ok=True)
        records.mkdir(exist_ok=True)
        name = f"rank_{context.rank}.bin"
        (target / name).write_bytes(bytes(PART_BYTES))
        record = record_files(target, [name], threads=1)[name]
        (records / f"{context.role}.{context.rank}.json").write_text(
            json.dumps({f"{context.role}/{name}": asdict(record)})
        )

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._answer, name)

    def _answer(self, name: str, *args: object, **kwargs: object) -> object:
        self._num_answers += 1
        if provides := self._specs[name].provides:
            batch = next(value for value in (*args, *kwargs.values()) if isinstance(value, Batch))
            if "response_ids" in provides:
                batch = self._with_responses(batch)
            more = ("rewards/stand_in", "components") if "scores" in provides else ()
            return made_up([*provides, *more], batch, start=self.context.rank)
        return _metrics(self._num_answers) if _returns_metrics(self._plays, name) else None

    def _with_responses(self, batch: Batch) -> Batch:
        """The batch with responses whose lengths differ from row to row, as those of a model do."""
        draw = torch.Generator().manual_seed(1 + 7919 * self.context.rank + self._num_answers)
        lengths = torch.randint(SHORTEST_RESPONSE, LONGEST_RESPONSE + 1, (len(batch),), generator=draw)
        ids = torch.zeros(int(lengths.sum()), dtype=torch.int64)
        return batch.with_columns(tokens={"response_ids": Ragged.from_lengths(ids, lengths)})


@cache
def _returns_metrics(plays: type[Worker], name: str) -> bool:
    return get_type_hints(getattr(plays, name)).get("return") == Metrics


def _metrics(seed: int) -> Metrics:
    kinds = (mean, total, maximum)
    return {f"actor/metric_{i}": kinds[i % 3](0.1 * i + seed) for i in range(NUM_METRICS)}


class Crowd:
    """All ranks of all pools, and the objects that they have made."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._hosts: dict[tuple[str, int], WorkerHost] = {}
        self._stored: dict[int, object] = {}
        """By the number of the call or put."""

    def obey(self, message: bytes) -> bool:
        """Executes a message of the driver; False once it was the last."""
        kind, *content = pickle.loads(message)
        if kind == "end":
            return False
        getattr(self, kind)(*content)
        return True

    def spawn(self, pool: str, ranks: int, spec: WorkerSpec) -> None:
        """Builds a stand-in on each rank of a pool."""
        played = replace(spec, worker_class=Instant, kwargs={"plays": spec.worker_class})
        for rank in range(ranks):
            if (pool, rank) not in self._hosts:
                self._hosts[pool, rank] = WorkerHost(rank, device="cpu", node="node", threads=1)
            self._hosts[pool, rank].build(played, None)

    def call(self, number: int, pool: str, rank: int, request: Request, taken: list[int]) -> None:
        """Runs a method on one rank, keeps the packet, and sends the rest of the answer."""
        stored = [self._stored[made] for made in taken]
        answer = self._hosts[pool, rank].run(request, *stored)
        if isinstance(answer, tuple):
            answer, self._stored[number] = answer
        self._connection.send_bytes(pickle.dumps((number, answer), protocol=5))

    def put(self, number: int, value: object) -> None:
        """Keeps an object of the driver."""
        self._stored[number] = value

    def get(self, numbers: list[int]) -> None:
        """Sends objects to the driver."""
        self._connection.send_bytes(pickle.dumps([self._stored[number] for number in numbers], protocol=5))

    def forget(self, numbers: list[int]) -> None:
        """Drops objects to which the driver has no reference any more."""
        for number in numbers:
            self._stored.pop(number, None)

    def count(self) -> None:
        """Sends the number of objects that are kept, and the bytes of their tensors."""
        packets = [value for value in self._stored.values() if isinstance(value, Packet)]
        sizes = [len(pickle.dumps(packet, protocol=5)) for packet in packets]
        self._connection.send_bytes(pickle.dumps((len(self._stored), sum(sizes)), protocol=5))


def main(address: str) -> None:
    """Serves a driver until it ends."""
    torch.set_num_threads(1)
    inbox: SimpleQueue[bytes] = SimpleQueue()
    with Client(address) as connection:
        threading.Thread(target=_receive, args=(connection, inbox), daemon=True).start()
        crowd = Crowd(connection)
        try:
            while crowd.obey(inbox.get()):
                pass
        except Exception:  # noqa: BLE001 (the driver raises it)
            connection.send_bytes(pickle.dumps(("failed", traceback.format_exc()), protocol=5))


def _receive(connection: Connection, inbox: SimpleQueue) -> None:
    """Takes messages as they come, so that the driver can send all of a call's before it reads an answer."""
    try:
        while True:
            inbox.put(connection.recv_bytes())
    except (EOFError, OSError):
        inbox.put(pickle.dumps(("end",)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(sys.argv[1])
