"""A rank that dies or hangs around a transfer of weights is named on all others, in time."""

import pytest

from hybridflow.config.rollout import TransferKind
from tests.distributed.reshard_deaths import VICTIM, transfer_without
from tests.spmd import run_ranks

TIMEOUT_SECONDS = 8.0
SLACK_SECONDS = 6.0
"""What a busy machine may add."""


def check(ranks, *, timeout_seconds):
    assert len(ranks) > VICTIM
    for rank, seen in enumerate(ranks):
        if rank != VICTIM:
            assert seen is not None, f"rank {rank} saw no error"
            assert seen.kind == "ResourceError", seen
            assert f"Rank {VICTIM} (" in seen.error, seen.error
            assert not any(f"ank {other} (" in seen.error for other in range(len(ranks)) if other != VICTIM), seen.error
            assert "Check that rank's log" in seen.error
            assert seen.seconds < timeout_seconds + SLACK_SECONDS
            assert not seen.is_complete
            assert "weights are incomplete" in seen.refusal
            assert seen.is_trained_intact


@pytest.mark.parametrize("executor", [TransferKind.send_recv, TransferKind.shared_memory])
def test_a_rank_killed_in_the_middle_of_a_transfer_is_named(executor):
    ranks = run_ranks(transfer_without, 3, executor, "middle", "dies", TIMEOUT_SECONDS, False, may_die=True)
    check(ranks, timeout_seconds=TIMEOUT_SECONDS)


def test_a_rank_killed_in_the_middle_is_named_by_ranks_that_did_not_wait_for_it():
    ranks = run_ranks(
        transfer_without, 4, TransferKind.send_recv, "middle", "dies", TIMEOUT_SECONDS, True, may_die=True
    )
    check(ranks, timeout_seconds=TIMEOUT_SECONDS)


def test_a_rank_that_hangs_in_the_middle_is_named():
    ranks = run_ranks(transfer_without, 4, TransferKind.send_recv, "middle", "hangs", 4.0, False, may_die=True)
    check(ranks, timeout_seconds=4.0)


@pytest.mark.parametrize("end", ["dies", "hangs"])
def test_a_rank_that_does_not_come_is_named(end):
    ranks = run_ranks(transfer_without, 3, TransferKind.auto, "before", end, 2.0, False, may_die=True)
    check(ranks, timeout_seconds=2.0)
