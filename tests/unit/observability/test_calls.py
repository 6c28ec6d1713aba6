"""Idle pools, the critical path and the totals of a step, against an oracle."""

import random
from itertools import pairwise

import pytest

from hybridflow.observability.calls import CallTotal, Section, Span, medians
from tests.oracles import calls as oracle

POOLS = {"policy": 2, "judge": 1, "values": 3}
NOON = 1_800_000_000.0
"""Seconds since the epoch, in which a float has a resolution of less than a microsecond."""

TICK_SECONDS = 0.001


def made_up_step(seed: int, num_calls: int = 9) -> list[oracle.Piece]:
    """Calls of random pools, each after some earlier ones and after the call before it in its processes."""
    chance = random.Random(seed)
    pieces: list[oracle.Piece] = []
    for call in range(1, num_calls + 1):
        pool = chance.choice(list(POOLS))
        needs = tuple(sorted(chance.sample(range(1, call), min(call - 1, chance.randint(0, 2)))))
        ready = max((piece.end for piece in pieces if piece.call in needs), default=0)
        for rank in range(POOLS[pool]):
            free = max((piece.end for piece in pieces if (piece.pool, piece.rank) == (pool, rank)), default=0)
            start = max(ready, free) + chance.randint(0, 3)
            pieces.append(oracle.Piece(call, pool, rank, start, start + chance.randint(1, 20), needs))
    return pieces


def section_of(pieces: list[oracle.Piece], start: int, end: int, *, waits: bool = False) -> Section:
    """A step of these calls; `waits`: each begins as soon as its process is free, and waits for another pool."""
    spans, free = list[Span](), dict[tuple[str, int], int]()
    for piece in pieces:
        process = (piece.pool, piece.rank)
        begins = free.get(process, 0) if waits else piece.start
        free[process] = piece.end
        times = (NOON + begins * TICK_SECONDS, (piece.end - begins) * TICK_SECONDS)
        waited = (piece.start - begins) * TICK_SECONDS
        spans.append(span(piece.call, *process, *times, needs=piece.needs, waited=waited))
    return Section("step", 1, NOON + start * TICK_SECONDS, (end - start) * TICK_SECONDS, spans, POOLS)


def span(
    call: int, pool: str, rank: int, start: float, seconds: float, *, needs=(), answers: bool = True, waited: float = 0
) -> Span:
    sizes = {"bytes_in": 100, "bytes_out": 10, "rows": 4, "tokens": 40, "peak_bytes": 1 << 30}
    return Span(
        call, pool, "work", pool, rank, start, seconds, **sizes, answers=answers, needs=needs, waited_seconds=waited
    )


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_the_critical_path_and_idle_fractions_are_those_of_the_oracle_and_waiting_is_idle(seed, waits):
    pieces = made_up_step(seed)
    end = max(piece.end for piece in pieces) + 5
    section = section_of(pieces, 0, end, waits=waits)
    path = section.critical_path()
    seconds = sum(map(section.seconds_within, path))
    assert seconds == pytest.approx(oracle.longest_path(pieces) * TICK_SECONDS, abs=1e-6)
    assert max(map(section.seconds_within, section.spans)) <= seconds <= section.seconds
    assert all(after.work_start >= before.end - 1e-6 for before, after in pairwise(path))
    assert section.idle_fractions() == pytest.approx(oracle.idle(pieces, list(POOLS), 0, end), abs=1e-4)


@pytest.mark.parametrize("seed", range(10))
def test_only_what_ran_within_the_step_counts(seed):
    pieces = made_up_step(seed)
    end = max(piece.end for piece in pieces)
    begin, until = end // 3, 2 * end // 3
    section = section_of(pieces, begin, until)
    clipped = [
        piece._replace(start=max(begin, piece.start), end=min(until, piece.end))
        for piece in pieces
        if piece.start < until and piece.end > begin
    ]
    path = section.critical_path()
    assert all(section.seconds_within(each) > 0.0 for each in path)
    assert sum(map(section.seconds_within, path)) <= section.seconds + 1e-6
    assert section.idle_fractions() == pytest.approx(oracle.idle(clipped, list(POOLS), begin, until), abs=1e-4)


def test_a_step_without_calls_is_idle():
    section = Section("step", 1, NOON, 2.0, [], POOLS)
    assert section.critical_path() == []
    assert section.idle_fractions() == {"policy": 1.0, "judge": 1.0, "values": 1.0}


def test_a_call_takes_as_long_as_its_slowest_rank_and_rows_of_ranks_that_do_not_answer_are_not_counted_again():
    """Rank 1 is slower in sum, though rank 0 has the slowest single call."""
    spans = [
        span(3, "policy", 0, NOON, 3.0),
        span(3, "policy", 1, NOON, 2.5, answers=False),
        span(6, "policy", 0, NOON + 3.0, 1.0),
        span(6, "policy", 1, NOON + 2.5, 2.5, answers=False, waited=0.5),
    ]
    section = Section("step", 1, NOON, 6.0, spans, POOLS)
    assert section.totals() == {("policy", "work"): CallTotal(4.5, rows=8, tokens=80, bytes_in=400, bytes_out=20)}


def test_a_median_is_over_the_steps_that_have_the_call():
    def step(number: int, seconds: float, pool: str) -> Section:
        return Section("step", number, NOON, 9.0, [span(number, pool, 0, NOON, seconds)], POOLS)

    found = medians([step(1, 9.0, "judge"), step(2, 1.0, "judge"), step(3, 2.0, "judge"), step(4, 5.0, "policy")])
    assert {name: total.seconds for name, total in found.items()} == {"judge.work": 2.0, "policy.work": 5.0}
    assert found["judge.work"].tokens == 40
