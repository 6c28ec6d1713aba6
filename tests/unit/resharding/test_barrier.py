"""Ranks meet in a store; who does not come is named to all others, in time."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from hybridflow.errors import ResourceError, StaleWeightsError
from hybridflow.resharding import barrier
from hybridflow.resharding.barrier import Barrier

NAMES = ["rank 0 (a)", "rank 1 (a)", "rank 2 (b)"]


def on_ranks(act, *, ranks=range(3), timeout_seconds=10.0):
    """What `act(barrier, rank)` returned or raised on each rank, each in a thread."""
    store = dist.HashStore()

    def one(rank):
        try:
            return act(Barrier(store, rank, NAMES, timeout_seconds=timeout_seconds), rank)
        except Exception as error:  # noqa: BLE001 (the test reads it)
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(one, ranks)), store


def test_all_come():
    def act(each, rank):
        for version in range(5):
            time.sleep(0.01 * rank)
            each.wait(f"the transfer of version {version}")
        return "came"

    found, store = on_ranks(act)
    assert found == ["came"] * 3
    assert store.num_keys() <= 2 * 5  # of the last stages; earlier ones are forgotten


def test_nobody_goes_on_before_all_have_come():
    began = time.monotonic()

    def act(each, rank):
        time.sleep(0.3 if rank == 1 else 0.0)
        each.wait("the start")
        return time.monotonic() - began

    assert min(on_ranks(act)[0]) >= 0.3


def test_a_rank_that_never_comes_is_named_to_all():
    began = time.monotonic()
    found, _ = on_ranks(lambda each, rank: each.wait("the transfer of version 3"), ranks=[0, 2], timeout_seconds=0.3)
    assert time.monotonic() - began < 2.0
    for error in found:
        assert isinstance(error, ResourceError)
        assert "Rank 1 (a) did not reach the transfer of version 3 within 0.3 s." in str(error)
        assert "rollout.transfer.timeout_seconds" in error.remedy


def test_ranks_whose_calls_are_cancelled_leave_at_once_unless_all_have_come():
    began = time.monotonic()

    def waiting(each, rank):
        each._is_cancelled = lambda: rank == 2 and time.monotonic() > began + 0.2
        each.wait("the transfer of version 3")

    found, _ = on_ranks(waiting, ranks=[0, 2], timeout_seconds=60.0)
    assert 0.2 < time.monotonic() - began < 5.0
    assert all(isinstance(error, ResourceError) and "was cancelled" in error.message for error in found)

    decided = dist.HashStore()
    decided.set("0/outcome", barrier.ALL_ARRIVED)
    Barrier(decided, 0, NAMES, timeout_seconds=1.0, is_cancelled=lambda: True).wait("the end")


def test_an_error_of_one_rank_is_raised_by_all():
    def act(each, rank):
        each.wait("the start")
        if rank == 1:
            each.fail(StaleWeightsError("w differs.", remedy="Stop."))
            return None
        each.wait("the end")

    found, _ = on_ranks(act)
    assert found[1] is None
    assert all(found[rank].remedy == "Stop." for rank in (0, 2))
    assert all(isinstance(found[rank], StaleWeightsError) and "w differs. Stop." in str(found[rank]) for rank in (0, 2))


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        pytest.param({0: [1], 2: []}, "Rank 1 (a) left the transfer unfinished (reset)", id="not all waited for it"),
        pytest.param({0: [1], 1: [2]}, "Rank 2 (b) left the transfer unfinished (reset)", id="a chain of waits"),
        pytest.param({0: [1], 1: [2], 2: [0]}, "All ranks are alive", id="broken connections"),
    ],
)
def test_a_rank_that_died_is_named_by_all_and_those_that_live_are_not(lost, words, monkeypatch):
    monkeypatch.setattr(barrier, "GRACE_SECONDS", 0.3)

    def act(each, rank):
        if not lost[rank]:
            each.wait("the end of the transfer")
        each.report_alive()
        raise each.peer_error("the transfer", lost[rank], "reset")

    for error in on_ranks(act, ranks=list(lost))[0]:
        assert isinstance(error, ResourceError)
        assert words in str(error) and str(error).count("(a)") == words.count("(a)")


def test_a_store_that_is_gone_is_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    with pytest.raises(ResourceError, match="The store of the ranks' barrier did not answer"):
        Barrier(client, 1, NAMES, timeout_seconds=5.0).wait("the start")
