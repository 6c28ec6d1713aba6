"""Connects the ranks of a pool: a store on the first rank, and torch.distributed on demand."""

# pyright: reportPrivateImportUsage=false

import os
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from hybridflow.controller.signed_store import StoreAddress, connected_store, served_store
from hybridflow.errors import ResourceError
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh

START_TIMEOUT_SECONDS = 600.0
"""Default of `trainer.start_timeout_seconds`."""


class Rendezvous:
    """How one rank joins the process group of its pool. `Rendezvous()` is for a single process.

    The driver gives every rank the address where the first one serves; no port is opened before `process_group`. Stores
    listen only at `host`, and the secret in the address signs their values.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        address: StoreAddress | None = None,
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
        """torch.distributed's default group over all ranks (gloo, and NCCL for GPU tensors), created at first use."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(
                backend, store=dist.PrefixStore("group", self._store(role)), rank=self.rank, world_size=self.world_size
            )
        group = dist.group.WORLD
        assert group is not None and group.size() == self.world_size, f"a group of {group and group.size()} exists"
        return group

    def ranks(self, role: str, mesh: ParallelMesh) -> Ranks:
        """This rank's place in a mesh over the pool: one object for all roles with that layout, which share groups."""
        if mesh.size > 1:
            self.process_group(role)
        if mesh not in self._ranks:
            self._ranks[mesh] = Ranks(self.rank, mesh)
        return self._ranks[mesh]

    def serve_link(self) -> StoreAddress:
        """Starts a store for connecting ranks of this pool and of another, at this node's address."""
        return served_store(self.host).address

    def link(self, address: StoreAddress) -> dist.Store:
        """The store at an address that `serve_link` returned."""
        return connected_store(address, self.timeout_seconds)

    def _store(self, role: str) -> dist.Store:
        """The pool's store, once every rank has joined; names those that have not."""
        if self.world_size == 1:
            return dist.HashStore()
        if self.address is None:
            raise ResourceError(
                f"The {self.world_size} ranks of '{role}' run in turn in this process and cannot communicate.",
                remedy="Use trainer.backend=ray for several ranks, or one device.",
            )
        store = connected_store(self.address, self.timeout_seconds)
        store.set(f"joined/{self.rank}", "1")
        joined = [f"joined/{rank}" for rank in range(self.world_size)]
        try:
            store.wait(joined, timedelta(seconds=self.timeout_seconds))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(joined) if not store.check([key])]
            raise ResourceError(
                f"Ranks {missing} of '{role}' did not join ranks 0-{self.world_size - 1} within"
                f" {self.timeout_seconds:.0f} s.",
                remedy="Call the same method on every rank, and check that these ranks' processes are alive and not"
                " stuck.",
            ) from error
        return store


def let_gloo_listen_at(host: str) -> None:
    """Makes gloo listen only at this address, in the whole process, unless the user names an interface."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(known.address == host for known in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return
