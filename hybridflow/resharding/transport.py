"""How the ranks of a transfer reach one another: a process group of their own, and a store where they sign."""

# pyright: reportPrivateImportUsage=false

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel.collectives import Plain, broadcast_from, checked_size
from hybridflow.resharding.roll_call import GRACE_SECONDS, RollCall

POLL_SECONDS = 0.0005
DIGEST_BYTES = 32


class LostPeer(Exception):
    """A rank's part of a transfer did not arrive: its connection broke, or time was up."""

    def __init__(self, peers: tuple[int, ...], reason: str) -> None:
        super().__init__(f"ranks {list(peers)}: {reason}")
        self.peers = peers
        self.reason = reason


class Group(Protocol):
    """What is used of torch's ProcessGroupGloo and ProcessGroupNCCL, whose own types leave these methods out.

    Such a group is outside the default world: two worlds can share it, and its end is not theirs.
    """

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Begins to send one tensor."""
        ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Begins to receive into one tensor."""
        ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> dist.Work:
        """Begins to gather tensors of one shape."""
        ...

    def allreduce(self, tensors: list[Tensor]) -> dist.Work:
        """Begins to add up one tensor over all ranks, in place."""
        ...

    def _allgather_base(self, output: Tensor, given: Tensor) -> dist.Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work: ...

    def abort(self) -> None:
        """Breaks all connections."""
        ...


class Parcel(NamedTuple):
    """A contiguous tensor to send to a peer, or to receive from it."""

    tensor: Tensor
    peer: int
    tag: int
    is_sent: bool


@dataclass(frozen=True)
class Transport:
    """One rank's way to all ranks of a transfer, colocated or in two pools; ranks are numbered over both.

    transport = open_transport(store, "weights", rank, size, device=torch.device("cpu"), timeout_seconds=300)
    work = transport.post([Parcel(tensor, 3, tag=0, is_sent=True)])
    transport.wait(work[0], (3,), deadline)
    """

    rank: int
    size: int
    store: dist.Store
    group: Group | None
    """None for a rank alone."""
    device: torch.device
    timeout_seconds: float

    @staticmethod
    def alone(device: torch.device | None = None) -> "Transport":
        """Of a single rank, which has nobody to wait for."""
        return Transport(0, 1, dist.HashStore(), None, device or torch.device("cpu"), 300.0)

    def deadline(self) -> float:
        """When somebody who does not answer from now on is given up, in seconds of `time.monotonic`.

        Earlier than the timeout by what it takes to find out who it is.
        """
        return time.monotonic() + max(self.timeout_seconds - GRACE_SECONDS, self.timeout_seconds / 2)

    def post(self, parcels: Sequence[Parcel]) -> list[dist.Work]:
        """Begins to send and receive; one work a parcel. Tensors stay as they are until their work is done."""
        group = self.group
        assert group is not None or not parcels, f"rank {self.rank} is alone"
        if group is None or not parcels:
            return []
        if self.device.type == "cpu":
            return [_post(group, parcel) for parcel in parcels]
        # NCCL runs what is grouped at once; one by one, a send would wait for a receive that is not posted yet.
        group._start_coalescing()
        for parcel in parcels:
            _post(group, parcel)
        try:
            return [group._end_coalescing()] * len(parcels)
        except RuntimeError as error:
            raise LostPeer(tuple(sorted({parcel.peer for parcel in parcels})), _first_line(error)) from error

    def gather_into(self, output: Tensor, given: Tensor) -> dist.Work:
        """Begins to gather what all ranks give, one behind the other."""
        assert self.group is not None, f"rank {self.rank} is alone"
        try:
            return self.group._allgather_base(output, given)
        except RuntimeError as error:
            raise LostPeer((), _first_line(error)) from error

    def wait(self, work: dist.Work, peers: tuple[int, ...], deadline: float) -> None:
        """Waits for work with some peers until a deadline; raises LostPeer past it, or when a connection breaks."""
        try:
            if self.device.type == "cpu":
                # torch takes 0 for no limit
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            else:
                _poll(work, deadline)
        except (RuntimeError, TimeoutError) as error:
            raise LostPeer(peers, _first_line(error)) from error

    def gather_plain(self, value: Plain) -> list:
        """The value of every rank, in order of ranks; tuples arrive as lists."""
        return [json.loads(message) for message in self.gather_messages(json.dumps(value).encode())]

    def gather_messages(self, message: bytes) -> list[bytes]:
        """The message of every rank, in order of ranks. What several ranks say alike travels once, and is one object.

        See `exchange_bytes` for what a rank receives.
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
            # each byte is one rank's, and zero on all others
            self.wait(self.group.allreduce([everything]), tuple(range(self.size)), self.deadline())
        encoded = {head: part.cpu().numpy().tobytes() for head, part in parts.items()}
        return [encoded[head] for head in heads]

    def abort(self) -> None:
        """Breaks this rank's connections, so that whoever waits for it stops waiting. Nothing can be sent any more."""
        if self.group is not None:
            self.group.abort()

    def _bytes(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        assert self.group is not None
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.wait(self.group.allgather([parts], [tensor]), tuple(range(self.size)), self.deadline())
        return parts


def exchange_bytes(messages: Sequence[bytes]) -> int:
    """What each rank receives of `gather_messages`, where these are the messages of all ranks.

    A digest and a length of every rank, and every different message twice: once as it is added up, and once as a sum.
    """
    return len(messages) * (DIGEST_BYTES + 8) + 2 * sum(map(len, set(messages)))


def joint_group(
    store: dist.Store, rank: int, size: int, *, timeout_seconds: float, device: torch.device | str
) -> Transport:
    """A transport over ranks of any worlds that reach one store, on which nothing else uses the same keys.

    Called on all ranks together, which are numbered over all pools; a rank that does not come is named. gloo for the
    CPU, NCCL for GPUs (not run on a GPU yet).
    """
    kind = torch.device(device)
    if size == 1:
        return Transport.alone(kind)
    names = [f"rank {number}" for number in range(size)]
    meeting = RollCall(dist.PrefixStore("meeting", store), rank, names, timeout_seconds=timeout_seconds)
    meeting.meet("the meeting of the ranks that exchange weights")
    timeout = timedelta(seconds=timeout_seconds)
    of_group = dist.PrefixStore("group", store)
    if kind.type == "cpu":
        group = dist.ProcessGroupGloo(of_group, rank, size, timeout)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(of_group, rank, size, options)
    return Transport(rank, size, store, cast(Group, group), kind, timeout_seconds)


def group_within(world: dist.ProcessGroup, *, timeout_seconds: float, device: torch.device | str) -> Transport:
    """A transport over the ranks of a process group, which goes on to work when a transfer fails."""
    name = broadcast_from(uuid.uuid4().hex.encode(), world, source=0).decode()
    store = dist.PrefixStore(f"resharding/{name}", world.get_group_store())
    return joint_group(store, world.rank(), world.size(), timeout_seconds=timeout_seconds, device=device)


def _post(group: Group, parcel: Parcel) -> dist.Work:
    act = group.send if parcel.is_sent else group.recv
    try:
        return act([parcel.tensor], parcel.peer, parcel.tag)
    except RuntimeError as error:  # the connection is broken already
        raise LostPeer((parcel.peer,), _first_line(error)) from error


def _poll(work: dist.Work, deadline: float) -> None:
    """Waits for work on a GPU without blocking in the driver, where no timeout would reach it."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError("time was up")
        time.sleep(POLL_SECONDS)
    # It is done: this raises what went wrong, and lets go of the tensors. Without a limit NCCL would raise nothing.
    work.wait(timedelta(seconds=1))


def _first_line(error: Exception) -> str:
    """What torch says, without where in its sources it says so."""
    line = str(error).partition("\n")[0]
    return (line.rpartition(".cc:")[2].partition("] ")[2] or line).partition(". This is typically")[0]
