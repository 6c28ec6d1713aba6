"""How the ranks of a pool find one another: a store on the first rank, and torch.distributed on demand."""

# pyright: reportPrivateImportUsage=false

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridflow.errors import ResourceError
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh

START_TIMEOUT_SECONDS = 600.0
"""Of `trainer.start_timeout_seconds`."""


class Rendezvous:
    """One rank's way into the process group of its pool. `Rendezvous()` is that of a process alone.

    The driver gives every rank the address where the first one serves; nothing is opened before `process_group`.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        address: str | None = None,
        *,
        timeout_seconds: float = START_TIMEOUT_SECONDS,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.rank = rank
        self.world_size = world_size
        self.address = address
        self.timeout_seconds = timeout_seconds
        self._ranks: dict[ParallelMesh, Ranks] = {}

    def process_group(self, role: str) -> dist.ProcessGroup:
        """The default group of torch.distributed over all ranks (gloo, and NCCL for GPU tensors), made at first use."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", self._store(role)), rank=self.rank, world_size=self.world_size
            )
        group = dist.group.WORLD
        assert group is not None and group.size() == self.world_size, f"a group of {group and group.size()} exists"
        return group

    def ranks(self, role: str, mesh: ParallelMesh) -> Ranks:
        """This rank's place in a mesh over the pool: one object for all roles laid out alike, which share groups."""
        if mesh.size > 1:
            self.process_group(role)
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(self.rank, mesh)
        return self._ranks[mesh]

    def serve_link(self) -> str:
        """Opens a store where ranks of this pool and of another can meet, at this node's address."""
        self._link = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        return f"{self.host}:{self._link.port}"

    def link(self, address: str) -> dist.Store:
        """The store at an address that `serve_link` gave."""
        host, _, port = address.rpartition(":")
        return _connected(host, int(port), None, self.timeout_seconds)

    def _store(self, role: str) -> dist.Store:
        if self.world_size == 1:
            return dist.HashStore()
        if self.address is None:
            raise ResourceError(
                f"The {self.world_size} ranks of '{role}' run one after another in this process and cannot meet.",
                remedy="Use trainer.backend=ray for several ranks, or one device.",
            )
        store = _client(self.address, self.world_size, self.timeout_seconds)
        _join(store, self.rank, self.world_size, role=role, timeout_seconds=self.timeout_seconds)
        return store


def served_store(host: str, *, port: int = 0) -> tuple[dist.TCPStore, str]:
    """A store served by this process, and its address; port 0 takes any free one."""
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise ResourceError(
            f"The ranks cannot meet at {host}:{port}: {str(error).splitlines()[0]}.",
            remedy="End the process that holds the port, or use port 0 for any free one.",
        ) from error
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(store.port)
    return store, f"{host}:{store.port}"


def _client(address: str, world_size: int, timeout_seconds: float) -> dist.TCPStore:
    host, _, port = address.rpartition(":")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port
    return _connected(host, int(port), world_size, timeout_seconds)


def _connected(host: str, port: int, world_size: int | None, timeout_seconds: float) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return dist.TCPStore(host, port, world_size, is_master=False, wait_for_workers=False, timeout=timeout)
    except (RuntimeError, OSError) as error:
        raise ResourceError(
            f"Rank 0 does not answer at {host}:{port}: {str(error).splitlines()[0]}.",
            remedy="See whether the first rank's process is alive and the nodes reach one another.",
        ) from error


def _join(store: dist.Store, rank: int, world_size: int, *, role: str, timeout_seconds: float) -> None:
    """Waits until every rank has come, and names those that have not."""
    store.set(f"joined/{rank}", "1")
    deadline = time.monotonic() + timeout_seconds
    missing = list(range(world_size))
    while missing:
        missing = [other for other in missing if not store.check([f"joined/{other}"])]
        if missing and time.monotonic() > deadline:
            raise ResourceError(
                f"Ranks {missing} of '{role}' did not join ranks 0-{world_size - 1} within {timeout_seconds:.0f} s.",
                remedy="Call the same method on every rank; see whether these ranks' processes are alive or stuck.",
            )
        if missing:
            time.sleep(0.01)
