"""The record of calls: who took what from whom, what counts, and clocks of other nodes."""

import psutil
import pytest
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import ResourcePool, WorkerGroup
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.controller.call_log import CallLog
from hybridflow.observability.calls import Span
from hybridflow.parallel import ParallelMesh
from tests.unit.controller.workers import Model, prompts


def groups(**devices: int) -> tuple[LocalBackend, dict[str, WorkerGroup]]:
    backend = LocalBackend()
    return backend, {
        role: WorkerGroup(Model, ResourcePool(role, count), backend, role=role) for role, count in devices.items()
    }


def needs_by_name(spans: list[Span]) -> dict[str, set[str]]:
    names = {span.call: span.name for span in spans}
    return {span.name: {names[number] for number in span.needs} for span in spans}


def test_a_call_needs_those_whose_columns_it_takes_and_those_that_the_driver_has_read():
    backend, roles = groups(actor=1, judge=1, critic=1)
    batch = roles["actor"].generate(prompts(rows=4)).result()
    scored, valued = roles["judge"].score(batch), roles["critic"].values(batch)
    update = roles["actor"].update(batch.join(valued))
    before = roles["critic"].columns_seen(scored.fetch())
    update.result()
    roles["judge"].last_seen()
    assert needs_by_name(backend.drain_calls()) == {
        "actor.generate": set(),
        "judge.score": {"actor.generate"},
        "critic.values": {"actor.generate"},
        "actor.update": {"actor.generate"},  # which declares all columns that it takes
        "critic.columns_seen": {"judge.score"},  # read by the driver, and itself after actor.generate
        "judge.last_seen": {"judge.score", "actor.update"},
    }
    assert before.result() is not None
    assert backend.drain_calls() == []


def test_rows_tokens_and_bytes_are_those_of_the_tensors_that_travelled():
    backend, roles = groups(actor=1, judge=1)
    given = prompts(rows=3, siblings=1)
    batch = roles["actor"].generate(given)
    roles["judge"].values(batch)
    roles["judge"].last_seen()
    generate, values, asked = backend.drain_calls()
    ids, responses = given.tokens("prompt_ids"), batch.fetch().tokens("response_ids")
    numbers = len(responses.values)
    assert (generate.rows, generate.tokens) == (3, numbers), "generated tokens only"
    assert generate.bytes_in == ids.values.nbytes + ids.offsets.nbytes
    assert generate.bytes_out == responses.values.nbytes + responses.offsets.nbytes + 3 * 8, "and weight_version"
    assert (values.rows, values.tokens) == (3, len(ids.values) + numbers)
    assert values.bytes_in == generate.bytes_in + responses.values.nbytes + responses.offsets.nbytes
    assert (asked.rows, asked.tokens, asked.bytes_in, asked.bytes_out) == (0, 0, 0, 0)


def test_a_call_knows_the_most_memory_that_its_process_has_taken():
    backend, roles = groups(actor=1)
    batch = roles["actor"].generate(prompts(rows=3, siblings=1))
    [before] = backend.drain_calls()
    freed_by_earlier_tests = before.peak_bytes - psutil.Process().memory_info().rss
    more = torch.zeros(freed_by_earlier_tests + (1 << 29), dtype=torch.uint8)
    del more
    roles["actor"].update(batch)
    [after] = backend.drain_calls()
    assert after.peak_bytes - before.peak_bytes == pytest.approx(1 << 29, rel=0.25), "freed memory counts"


def test_only_one_rank_of_a_tensor_group_answers():
    backend, mesh = LocalBackend(), ParallelMesh({"data": 2, "tensor": 2})
    judge = WorkerGroup(Model, ResourcePool("judge", 4), backend, role="judge", mesh=mesh)
    batch = Batch.of(
        rows={"uid": torch.arange(4)},
        tokens={"response_ids": Ragged.from_rows([[1, 2], [3], [4], [5, 6, 7]])},
        objects={"answer": ["1", "2", "3", "4"]},
    )
    judge.score(batch)
    spans = backend.drain_calls()
    assert [span.rows for span in spans] == [2, 2, 2, 2]
    assert [span.answers for span in spans] == [True, False, True, False]
    assert [span.bytes_out > 0 for span in spans] == [True, False, True, False]


@pytest.mark.parametrize("ahead", [-7000.0, -0.2, 0.0, 0.2, 7000.0])
def test_the_clock_of_another_node_is_corrected_by_what_its_calls_allow(ahead):
    """Calls of 1 s begin 20 ms after they are sent, and their answers are here 30 ms after they end."""
    log, now = CallLog(), 1_800_000_000.0
    for sent in (now, now + 5.0):
        number = log.begin("actor", "update", "main", takes=(), ranks=2, answering=[0])
        for rank, (node, clock) in enumerate({"here": 0.0, "there": ahead}.items()):
            measured = [sent + 0.02 + clock, 1.0, 0, 0, 0, 0, 0, 0.0]
            log.answered(number, rank, measured, node=node, sent=sent, now=sent + 1.05)
    spans = log.drain()
    for span, sent in zip(spans, (now, now, now + 5.0, now + 5.0), strict=True):
        assert span.start >= sent - 1e-6 and span.end <= sent + 1.05 + 1e-6
        assert span.start == pytest.approx(sent + 0.02, abs=0.031)
    assert all(span.start == pytest.approx(sent + 0.02) for span, sent in zip(spans[::2], (now, now + 5), strict=True))
    assert log.drain() == []


def test_a_call_that_ends_after_the_drain_comes_with_the_next():
    log, now = CallLog(), 1_800_000_000.0
    first = log.begin("actor", "generate", "main", takes=(), ranks=2, answering=[0, 1])
    log.answered(first, 0, [now, 1.0, 0, 0, 4, 9, 0, 0.25], sent=now, now=now + 1.0)
    assert [(span.rank, span.work_start - span.start) for span in log.drain()] == [(0, 0.25)]
    log.answered(first, 1, [now, 2.0, 0, 0, 4, 9, 0, 0.0], sent=now, now=now + 2.0)
    assert [(span.rank, span.name) for span in log.drain()] == [(1, "actor.generate")]
