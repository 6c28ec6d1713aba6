"""Objects gathered and dealt out, and steps that fail together."""

import pytest
import torch.distributed as dist

from hybridflow.errors import EngineError
from hybridflow.parallel import collectives
from hybridflow.parallel.collectives import Together, all_gather_bytes, broadcast_bytes, gather_json, scatter_json
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import run_ranks


def ranks_of(rank: int) -> Ranks:
    return Ranks(rank, ParallelMesh({"data": 3}))


def there_and_back(rank: int) -> tuple[list[int], str]:
    ranks = ranks_of(rank)
    numbers = gather_json(rank * rank, ranks)
    return numbers, scatter_json([f"for {index}: {number}" for index, number in enumerate(numbers)], ranks)


def test_rank_0_gathers_and_deals_out():
    assert run_ranks(there_and_back, 3) == [([0, 1, 4], "for 0: 0"), ([], "for 1: 1"), ([], "for 2: 4")]


def refusals(rank: int) -> list[str]:
    collectives.MOST_BYTES = 4
    found = []
    for send in (
        lambda: all_gather_bytes(b"x" * 9, None),
        lambda: broadcast_bytes(b"x" * 9, dist.group.WORLD, source=0),
    ):
        try:
            send()
        except EngineError as error:
            found.append(error.message)
    return found


def test_every_rank_refuses_a_message_that_is_announced_as_too_long():
    refused = "A rank announced a message of 9 bytes; at most 4 are accepted."
    assert run_ranks(refusals, 2, timeout_seconds=60.0) == [[refused] * 2] * 2


FAILURES: list[tuple[dict[int, Exception], list[str]]] = [
    ({}, ["done"] * 3),
    ({1: EngineError("no weight.", remedy="Find it.")}, ["EngineError: no weight. Find it."] * 3),
    (
        {0: OSError("first"), 2: OSError("last")},
        ["OSError: first", "EngineError: Rank 0 failed: OSError: first. See the log of that rank.", "OSError: last"],
    ),
]
"""What each rank raises in a step, and how the step ends on each."""


def steps(rank: int) -> list[str]:
    ends = []
    for failures, _ in FAILURES:
        try:
            with Together(ranks_of(rank)):
                if rank in failures:
                    raise failures[rank]
            ends.append("done")
        except (EngineError, OSError) as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


def test_a_step_ends_on_all_ranks_with_the_error_of_one():
    assert list(zip(*run_ranks(steps, 3), strict=True)) == [tuple(ends) for _, ends in FAILURES]


def test_one_rank_alone_needs_no_others():
    alone = Ranks.alone()
    assert scatter_json(gather_json("own", alone), alone) == "own"
    with pytest.raises(OSError, match="own"), Together(alone):
        raise OSError("own")
