"""Communication between the ranks of a transfer: a separate process group, and a store for their barrier."""

# pyright: reportPrivateImportUsage=false

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.collectives import Plain, broadcast_bytes, checked_size
from hybridflow.resharding.barrier import GRACE_SECONDS, Barrier

POLL_SECONDS = 0.0005
DIGEST_BYTES = 32


class LostPeer(Exception):
    """A rank's part of a transfer did not arrive: its connection broke, or the time ran out."""

    def __init__(self, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(f"ranks {list(peers)}: {reason}")
        self.peers = peers
        self.reason = reason


class Group(Protocol):
    """The methods used of torch's ProcessGroupGloo and ProcessGroupNCCL, whose own type stubs leave them out.

    Such a group is outside the default world: ranks of two worlds can share it, and it can fail without them.
    """

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Starts to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Starts to receive into one tensor."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Starts to gather tensors of one shape."""
        ...

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Starts to sum one tensor over all ranks, in place."""
        ...

    def _allgather_base(self, output: Tensor, given: Tensor) -> dist.Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work: ...

    def abort(self) -> None:
        """Breaks all connections."""
        ...


class P2POp(NamedTuple):
    """A contiguous tensor to send to a peer, or to receive from it."""

    tensor: Tensor
    peer: int
    tag: int
    is_sent: bool


@dataclass(frozen=True)
class Transport:
    """One rank's connections to all ranks of a transfer, colocated or in two pools; ranks are numbered over both.

    transport = joint_group(store, rank, size, timeout_seconds=300, device="cpu")
    work = transport.post([P2POp(tensor, 3, tag=0, is_sent=True)])
    transport.wait(work[0], (3,), transport.deadline())
    """

    rank: int
    size: int
    store: dist.Store
    group: Group | None
    """None for a rank alone."""
    device: torch.device
    timeout_seconds: float
    is_cancelled: Callable[[], bool] = lambda: False
    """Whether the driver has cancelled the call of this rank; asked while it waits for others."""

    @staticmethod
    def alone(device: torch.device | None = None) -> "Transport":
        """The transport of a single rank."""
        return Transport(0, 1, dist.HashStore(), None, device or torch.device("cpu"), 300.0)

    def deadline(self) -> float:
        """When to give up on a peer that does not answer from now on, in seconds of `time.monotonic`.

        Earlier than the timeout, to leave time to find out which rank it is.
        """
        return time.monotonic() + max(self.timeout_seconds - GRACE_SECONDS, self.timeout_seconds / 2)

    def post(self, ops: Sequence[P2POp]) -> list[dist.Work]:
        """Starts sends and receives; returns one work per op. Do not access the tensors until their work is done."""
        group = self.group
        assert group is not None or not ops, f"rank {self.rank} is alone"
        if group is None or not ops:
            return []
        if self.device.type == "cpu":
            return [_post(group, op) for op in ops]
        # Grouped, because NCCL would otherwise block a send until a receive that is not posted yet.
        group._start_coalescing()
        for op in ops:
            _post(group, op)
        try:
            return [group._end_coalescing()] * len(ops)
        except RuntimeError as error:
            raise LostPeer(tuple(sorted({op.peer for op in ops})), _first_line(error)) from error

    def gather_into(self, output: Tensor, given: Tensor) -> dist.Work:
        """Starts an all-gather that concatenates the tensors of all ranks."""
        assert self.group is not None, f"rank {self.rank} is alone"
        try:
            return self.group._allgather_base(output, given)
        except RuntimeError as error:
            raise LostPeer((), _first_line(error)) from error

    def wait(self, work: dist.Work, peers: tuple[int, ...], deadline: float) -> None:
        """Waits for work with some peers; raises LostPeer at the deadline, or when a connection breaks."""
        try:
            if self.device.type == "cpu":
                # torch treats 0 as no limit
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            else:
                _poll(work, deadline)
        except (RuntimeError, TimeoutError) as error:
            raise LostPeer(peers, _first_line(error)) from error

    def gather_plain(self, value: Plain) -> list:
        """The value of every rank, in rank order; tuples arrive as lists."""
        return [json.loads(message) for message in self.gather_messages(json.dumps(value).encode())]

    def gather_messages(self, message: bytes) -> list[bytes]:
        """The message of every rank, in rank order. Equal messages are sent once, and are one object.

        A rank receives a digest and a length per rank, and every distinct message twice, as in a ring all-reduce.
        """
        if self.group is None:
            return [message]
        head = hashlib.sha256(message).digest() + len(message).to_bytes(8, "little")
        heads = [part.cpu().numpy().tobytes() for part in self._all_gather(self._bytes(head))]
        first = {head: rank for rank, head in reversed(list(enumerate(heads)))}
        lengths = {head: int.from_bytes(head[DIGEST_BYTES:], "little") for head in sorted(first, key=first.__getitem__)}
        everything = torch.zeros(checked_size(sum(lengths.values())), dtype=torch.uint8, device=self.device)
        parts = dict(zip(lengths, everything.split(list(lengths.values())), strict=True))
        if first[head] == self.rank and message:
            parts[head].copy_(self._bytes(message))
        if len(everything):
            # one rank contributes each byte, all others zero
            self.wait(self.group.allreduce([everything]), tuple(range(self.size)), self.deadline())
        messages = {head: part.cpu().numpy().tobytes() for head, part in parts.items()}
        return [messages[head] for head in heads]

    def abort(self) -> None:
        """Breaks this rank's connections, so that its peers stop waiting. Nothing can be sent afterwards."""
        if self.group is not None:
            self.group.abort()

    def _bytes(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        assert self.group is not None
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(self.group.allgather([parts], [tensor]), tuple(range(self.size)), self.deadline())
        return parts


def joint_group(
    store: dist.Store,
    rank: int,
    size: int,
    *,
    timeout_seconds: float,
    device: torch.device | str,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Transport:
    """A transport over ranks of any worlds that share a store, which nothing else may use under the same keys.

    Call it on all ranks together, numbered over all pools; raises an error that names the ranks that are missing. Uses
    gloo on CPUs and NCCL on GPUs (not run on a GPU yet).
    """
    kind = torch.device(device)
    if size == 1:
        return Transport.alone(kind)
    names = [f"rank {number}" for number in range(size)]
    of_barrier = dist.PrefixStore("barrier", store)
    barrier = Barrier(of_barrier, rank, names, timeout_seconds=timeout_seconds, is_cancelled=is_cancelled)
    barrier.wait("the start of the group that exchanges weights")
    timeout = timedelta(seconds=timeout_seconds)
    of_group = dist.PrefixStore("group", store)
    if kind.type == "cpu":
        group = dist.ProcessGroupGloo(of_group, rank, size, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(of_group, rank, size, options)
    return Transport(rank, size, store, cast(Group, group), kind, timeout_seconds, is_cancelled)


def group_within(world: dist.ProcessGroup, *, timeout_seconds: float, device: torch.device | str) -> Transport:
    """A transport over the ranks of a process group, which keeps working if a transfer fails."""
    name = broadcast_bytes(uuid.uuid4().hex.encode(), world, source=0).decode()
    store = dist.PrefixStore(f"resharding/{name}", world.get_group_store())
    return joint_group(store, world.rank(), world.size(), timeout_seconds=timeout_seconds, device=device)


def _post(group: Group, op: P2POp) -> dist.Work:
    act = group.send if op.is_sent else group.recv
    try:
        return act([op.tensor], op.peer, op.tag)
    except RuntimeError as error:  # the connection is broken already
        raise LostPeer((op.peer,), _first_line(error)) from error


def _poll(work: dist.Work, deadline: float) -> None:
    """Waits for GPU work without blocking in the driver, where no timeout applies."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        time.sleep(POLL_SECONDS)
    # Raises the work's error, if any, and releases its tensors. Without a timeout NCCL would raise nothing.
    work.wait(timedelta(seconds=1))


def _first_line(error: Exception) -> str:
    """torch's message without the position in its sources."""
    line = str(error).partition("\n")[0]
    return (line.rpartition(".cc:")[2].partition("] ")[2] or line).partition(". This is typically")[0]
