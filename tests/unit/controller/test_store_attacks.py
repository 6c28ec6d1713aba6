"""A stranger on the network who reaches the store where the ranks of a live program meet."""

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hybridflow.controller.rendezvous import Rendezvous, let_gloo_listen_at
from hybridflow.controller.signed_store import SignedStore, StoreAddress, connected_store, served_store
from hybridflow.errors import HybridflowError, ResourceError
from hybridflow.resharding.barrier import Barrier
from hybridflow.resharding.transport import LostPeer, group_within
from tests.spmd import run_ranks

STAGES = 40


class Payload:
    """Unpickled, it leaves a mark on the disk."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def met(_: int, rank: int, address: StoreAddress) -> tuple[list[str], str]:
    """Where a rank's process listens, and how its meetings with the other rank ended."""
    let_gloo_listen_at("127.0.0.1")
    world = Rendezvous(rank, 2, address).process_group("actor")
    transport = group_within(world, timeout_seconds=20.0, device="cpu")
    listening = [link.laddr.ip for link in psutil.Process().net_connections("inet") if link.status == "LISTEN"]
    barrier = Barrier(transport.store, rank, ["rank 0", "rank 1"], timeout_seconds=20.0)
    try:
        for stage in range(STAGES):
            barrier.wait(f"stage {stage}")
            try:
                assert transport.gather_plain([rank, stage]) == [[0, stage], [1, stage]]
            except LostPeer as error:  # the other rank has already read the outcome that the stranger wrote
                barrier.report_alive()
                raise barrier.peer_error(f"stage {stage}", error.peers, error.reason) from error
            time.sleep(0.05)
    except HybridflowError as error:
        return listening, f"{type(error).__name__}: {error}"
    return listening, "done"


def test_an_outcome_of_a_stranger_ends_the_run_in_our_words_and_runs_nothing(tmp_path):
    mark, store, place = tmp_path / "mark", served_store("127.0.0.1"), ""
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(run_ranks, met, 1, rank, store.address) for rank in range(2)]
        stranger = dist.TCPStore("127.0.0.1", store.address.port, is_master=False, wait_for_workers=False)
        until = time.monotonic() + 30
        while not place and time.monotonic() < until:  # until the program keeps how a stage has ended
            time.sleep(0.05)
            found = [key for key in stranger.list_keys() if key.endswith("/outcome") and "barrier" not in key]
            place = found[0].rsplit("/", 2)[0] if found else ""
        for number in range(STAGES):
            stranger.set(f"{place}/{number}/outcome", pickle.dumps(Payload(mark)))
        answers = [rank.result()[0] for rank in ranks]
    assert not mark.exists()
    for listening, ended in answers:
        assert set(listening) == {"127.0.0.1"}
        assert ended.startswith("ResourceError: The store at 127.0.0.1:") and "that none of them wrote" in ended
        assert "restrict access to the network" in ended


@contextmanager
def pair() -> Iterator[tuple[SignedStore, dist.Store]]:
    store = served_store("127.0.0.1")
    yield store, dist.TCPStore("127.0.0.1", store.address.port, is_master=False, wait_for_workers=False)


def test_values_are_told_and_compared_as_in_any_store():
    with pair() as (store, _):
        other = connected_store(store.address, 5.0)
        store.set("a", "one")
        assert other.get("a") == b"one"
        assert other.compare_set("a", "two", "three") == b"one"
        assert other.compare_set("a", "one", "three") == b"three" == store.get("a")
        assert store.compare_set("fresh", "", b"first") == b"first" == other.compare_set("fresh", "", "second")
        assert store.add("count", 2) == 2 and other.add("count", 3) == 5
        assert store.check(["a", "fresh"]) and other.delete_key("a") and not store.check(["a"])


def test_a_value_moved_to_another_key_or_signed_with_another_secret_is_refused():
    with pair() as (store, stranger):
        store.set("a", "one")
        stranger.set("b", stranger.get("a"))
        other = SignedStore(stranger, store.address._replace(secret=b"guess"))
        other.set("c", "two")
        for key in ("b", "c"):
            with pytest.raises(ResourceError, match=f"bytes under '{key}'.*resume from the last checkpoint"):
                store.get(key)


def test_what_torch_reads_of_a_stranger_is_refused_too():
    """gloo's ranks connect to the addresses that they find in the store."""
    with pair() as (store, stranger):
        of_group = dist.PrefixStore("group", store)
        stranger.set("group/0/1", b"an address of mine")
        thread = threading.Thread(target=lambda: of_group.set("0/0", b"own"))
        thread.start()
        thread.join()
        assert of_group.get("0/0") == b"own"
        with pytest.raises(Exception, match="that none of them wrote"):
            of_group.get("0/1")


def test_the_secret_is_not_in_the_text_of_an_address():
    address = StoreAddress("127.0.0.1", 1234, b"\x01\x02secret")
    assert f"{address} {address!r}" == "127.0.0.1:1234 127.0.0.1:1234"
