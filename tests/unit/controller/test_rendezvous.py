"""Ranks that meet: those that do not come are named."""

import os
import socket

import psutil
import pytest
import torch.distributed as dist

from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.signed_store import StoreAddress, served_store
from hybridflow.controller.worker_host import WorkerHost
from hybridflow.errors import ResourceError


@pytest.fixture(autouse=True)
def without_a_group(monkeypatch):
    """Whatever group earlier tests of the process have left; no test here may open one."""

    def opened(*args: object, **kwargs: object) -> None:
        raise AssertionError("a group was opened")

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", opened)


def test_ranks_that_do_not_come_are_named():
    store = served_store("127.0.0.1")
    store.set("joined/2", "1")
    with pytest.raises(ResourceError, match=r"Ranks \[1, 3\] of 'critic' did not join.*same method on every rank"):
        Rendezvous(0, 4, store.address, timeout_seconds=0.1).process_group("critic")


def test_a_store_that_is_not_served_is_named():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ResourceError, match=rf"Rank 0 does not answer at 127\.0\.0\.1:{port}"):
        Rendezvous(1, 2, StoreAddress("127.0.0.1", port, b"secret"), timeout_seconds=0.2).process_group("critic")


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"cannot connect through 127\.0\.0\.1:{port}.*port 0"):
            served_store("127.0.0.1", port=port)


def test_ranks_of_the_local_backend_cannot_meet():
    with pytest.raises(ResourceError, match=r"2 ranks of 'critic'.*trainer\.backend=ray"):
        Rendezvous(0, 2).process_group("critic")


def test_groups_that_an_engine_opens_for_one_rank_listen_on_the_loopback_interface(monkeypatch):
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name[:4] != "GLOO"})
    WorkerHost(0, device="cpu", node="here", threads=None)
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [address.address for address in psutil.net_if_addrs()[interface]]
