"""Groups on Ray give what they give on the local backend, and no token passes through the driver."""

import pickle
import re
import time

import psutil
import pytest
import ray
import torch

from hybridflow.batch import Batch, Ragged
from hybridflow.controller import ResourcePool, WorkerGroup, wait
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.errors import ResourceError
from recipes import custom_protocol
from tests.unit.controller.test_batch_ref import same
from tests.unit.controller.workers import Model, Talker, prompts

pytestmark = pytest.mark.ray


@pytest.fixture(scope="session")
def actor(ray_backend, pair) -> WorkerGroup:
    return WorkerGroup(Model, pair, ray_backend, role="actor", kwargs={"scale": 3.0})


@pytest.fixture(scope="session")
def talker(ray_backend, pair) -> WorkerGroup:
    return WorkerGroup(Talker, pair, ray_backend, role="talker")


@pytest.fixture(scope="session")
def judge(ray_backend, single) -> WorkerGroup:
    return WorkerGroup(Model, single, ray_backend, role="judge")


@pytest.fixture(scope="session")
def other_talker(ray_backend, single) -> WorkerGroup:
    return WorkerGroup(Talker, single, ray_backend, role="other_talker")


def path(actor: WorkerGroup, judge: WorkerGroup, given: Batch):
    batch = actor.generate(given)
    return batch.join(judge.score(batch), actor.values(batch), judge.values(batch))


def test_the_path_of_a_batch_is_that_of_the_local_backend(actor, judge):
    given = prompts(rows=9)
    local = LocalBackend()
    one, two = ResourcePool("one", 1), ResourcePool("two", 2)
    expected = path(
        WorkerGroup(Model, two, local, role="actor", kwargs={"scale": 3.0}),
        WorkerGroup(Model, one, local, role="judge"),
        given,
    )
    batch = path(actor, judge, given)
    assert same(batch.fetch(), expected.fetch())
    assert batch.meta == expected.meta == {"temperature": 0.5}
    assert torch.equal(batch.lengths, expected.lengths)
    shuffled = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    assert same(actor.values(batch.take(shuffled)).fetch(), actor.values(batch).fetch().select(shuffled))
    metrics, expected_metrics = wait(actor.update(batch), judge.update(batch)), judge.update(batch).result()
    assert metrics["loss"].value == pytest.approx(expected_metrics["loss"].value)
    assert metrics["rows"].value == 2 * len(batch)


def test_answers_can_be_joined_and_passed_on_before_they_are_there(judge, other_talker):
    other_talker.sleep(3.0)
    start = time.perf_counter()
    batch = path(judge, judge, prompts())
    update = judge.update(batch)
    assert time.perf_counter() - start < 2.0
    assert not batch.settled
    assert update.result()["rows"].value == 12
    assert time.perf_counter() - start > 2.0


def test_only_required_columns_travel(actor):
    batch = actor.generate(prompts())
    assert actor.last_seen().result() == [["prompt_ids"]] * 2
    actor.values(actor.score(batch))
    assert [sorted(seen) for seen in actor.last_seen().result()] == [["prompt_ids", "response_ids"]] * 2


def test_pools_run_at_once_and_roles_of_one_pool_in_turn(actor, talker, other_talker):
    wait(talker.nothing(), other_talker.nothing())
    there, here = wait(talker.sleep(0.7), other_talker.sleep(0.7))
    assert max(start for start, _ in [*there, here]) < min(end for _, end in [*there, here])
    first, second = wait(talker.sleep(0.2), talker.sleep(0.2))
    assert all(one[1] <= two[0] for one, two in zip(first, second, strict=True))


def test_protocols_of_users_and_one_input_a_rank(talker, ray_backend, pair):
    assert talker.add([1, 2], right=[10, 20]).result() == [11, 22]
    counter = WorkerGroup(custom_protocol.Counter, pair, ray_backend, role="counter")
    assert counter.total(custom_protocol.prompts()).result() == {0: 12, 1: 9}
    assert counter.count(custom_protocol.prompts()).fetch().row("uid").tolist() == [1, 5, 2, 3, 4, 0]


def test_ranks_of_a_pool_can_sum(talker, other_talker):
    assert talker.total(2.0).result() == [6.0, 6.0]
    assert talker.total(1.0).result() == [3.0, 3.0]
    assert other_talker.total(1.0).result() == 1.0


def test_workers_know_their_threads_and_ranks(talker):
    assert talker.environment("OMP_NUM_THREADS").result() == ["1", "1"]
    assert talker.environment("RANK").result() == ["0", "1"]
    assert talker.environment("TORCHDYNAMO_DISABLE").result() == ["1", "1"]


def test_the_seconds_of_calls_are_known(ray_backend, other_talker):
    ray_backend.drain_calls()
    other_talker.sleep(0.2).result()
    [span] = ray_backend.drain_calls()
    assert span.name == "other_talker.sleep"
    assert 0.2 <= span.seconds < 0.4
    assert ray_backend.drain_calls() == []


def test_bytes_through_the_driver_do_not_depend_on_tokens(ray_backend, actor, judge, monkeypatch):
    """Counts what the driver sends with calls, what it stores, and the small answers it reads.

    Objects below 100 KB, which Ray forwards by itself, are not counted.
    """
    sent = []
    submit, put, get = ray_backend.call, ray.put, ray.get

    def counting_call(handle, method, arguments, *rest):
        sent.append(len(pickle.dumps((arguments.args, arguments.kwargs))))
        return submit(handle, method, arguments, *rest)

    def counting_put(value):
        sent.append(len(pickle.dumps(value)))
        return put(value)

    def counting_get(references, **kwargs):
        values = get(references, **kwargs)
        sent.append(len(pickle.dumps(values)))
        return values

    monkeypatch.setattr(ray_backend, "call", counting_call)
    monkeypatch.setattr(ray, "put", counting_put)
    monkeypatch.setattr(ray, "get", counting_get)

    def bytes_of(tokens: int) -> int:
        sent.clear()
        given = Batch.of(
            rows={"uid": torch.arange(8)},
            tokens={"prompt_ids": Ragged.from_rows([[tokens]] * 8, dtype=torch.int64)},
            objects={"answer": ["1"] * 8},
        )
        batch = path(actor, judge, given)
        assert int(batch.lengths.sum()) == 8 * (tokens + 1)
        actor.update(batch).result()
        return sum(sent)

    few, many = bytes_of(10), bytes_of(10_000)
    assert max(few, many) < 8 * 1000, "eight rows of 10,000 tokens each have at least 80,000 bytes"


def test_a_pool_that_does_not_fit_is_refused(ray_backend):
    with pytest.raises(ResourceError, match=r"'big' needs 100 devices \(cpu\); the cluster has 8.*trainer\.devices"):
        WorkerGroup(Talker, ResourcePool("big", 100), ray_backend, role="talker")


def test_processes_are_named_after_their_roles_and_during_a_call_after_the_call(talker):
    first, _ = processes = [psutil.Process(pid) for pid in wait(talker.pid())]
    sleeping = talker.sleep(3.0)
    until = time.monotonic() + 2.5
    while not (during := first.cmdline()[0]).startswith("ray::RayHost talker.sleep rank 0"):
        assert time.monotonic() < until, during
        time.sleep(0.05)
    wait(sleeping)
    until = time.monotonic() + 2.5
    for rank, process in enumerate(processes):
        own = rf"ray::RayHost \S*talker\S* rank {rank}"
        while not re.fullmatch(own, after := process.cmdline()[0].rstrip()):  # Ray names calls of its own
            assert time.monotonic() < until, after
            time.sleep(0.05)
