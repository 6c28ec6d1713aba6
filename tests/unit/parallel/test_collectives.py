"""Objects gathered and dealt out, and steps that fail together."""

import pytest

from hybridflow.errors import EngineError
from hybridflow.parallel.collectives import Together, gather_json, scatter_json
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


def step(rank: int, failures: dict[int, Exception]) -> str:
    try:
        with Together(ranks_of(rank)):
            if rank in failures:
                raise failures[rank]
    except (EngineError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def test_a_step_that_all_can_take_is_taken():
    assert run_ranks(step, 3, {}) == ["done"] * 3


def test_an_error_of_ours_is_the_error_of_all():
    assert (
        run_ranks(step, 3, {1: EngineError("no weight.", remedy="Find it.")})
        == ["EngineError: no weight. Find it."] * 3
    )


def test_another_error_is_told_with_its_rank():
    first, second, third = run_ranks(step, 3, {2: OSError("the disk is full")})
    assert first == second == "EngineError: Rank 2 failed: OSError: the disk is full. See the log of that rank."
    assert third == "OSError: the disk is full"


def test_ranks_that_fail_each_keep_their_own_error():
    answers = run_ranks(step, 3, {0: OSError("first"), 2: OSError("last")})
    assert answers[0] == "OSError: first"
    assert "Rank 0 failed: OSError: first" in answers[1]
    assert answers[2] == "OSError: last"


def test_one_rank_alone_needs_no_others():
    alone = Ranks.alone()
    assert scatter_json(gather_json("own", alone), alone) == "own"
    with pytest.raises(OSError, match="own"), Together(alone):
        raise OSError("own")
