"""Calls to a group on the local backend: who gets what, and what comes back."""

import sys
import traceback

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.controller import BatchRef, ResourcePool, WorkerGroup, wait
from hybridflow.controller.backends.local import LocalBackend
from hybridflow.errors import BatchError, ConfigError, RewardError, WorkerError
from hybridflow.parallel import ParallelMesh
from recipes import custom_protocol
from tests.unit.controller.workers import Broken, Model, Talker, prompts


def group(worker_class, devices=1, **kwargs) -> WorkerGroup:
    return WorkerGroup(worker_class, ResourcePool("main", devices), LocalBackend(), role="actor", **kwargs)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_answers_add_columns_and_keep_the_order_of_rows_on_any_number_of_ranks(devices):
    actor, judge = group(Model, devices, kwargs={"scale": 3.0}), group(Model, max(1, devices - 1))
    given = prompts(rows=8)
    batch = actor.generate(given)
    assert isinstance(batch, BatchRef)
    batch = batch.join(judge.score(batch), actor.values(batch))
    fetched, numbers = batch.fetch(), [1 + i // 2 for i in range(16)]
    for name in ("uid", "sample_index"):
        assert fetched.row(name).tolist() == given.row(name).tolist()
    rows = {name: [row.tolist() for row in fetched.tokens(name).rows()] for name in fetched.token_columns}
    assert rows["prompt_ids"] == [row.tolist() for row in given.tokens("prompt_ids").rows()]
    assert rows["response_ids"] == [[number] * number for number in numbers]
    assert rows["values"] == [[3.0 * number] * number for number in numbers]
    assert fetched.row("scores").tolist() == [number - 1.0 for number in numbers]
    assert fetched.object("answer") == given.object("answer")
    assert fetched.meta == {"temperature": 0.5}
    metrics = actor.update(batch).result()
    tokens = fetched.tokens("response_ids").values.float()
    assert metrics["loss"].value == pytest.approx(float(tokens.mean()))
    assert metrics["rows"].value == 16


def test_only_required_and_optional_columns_travel():
    actor = group(Model)
    batch = actor.generate(prompts())
    assert actor.last_seen().result() == ["prompt_ids"]
    actor.values(batch.join(actor.score(batch)))
    assert sorted(actor.last_seen().result()) == ["prompt_ids", "response_ids"]
    bonus = Batch.of(rows={"bonus": torch.ones(len(batch))})
    actor.values(batch.join(bonus))
    assert sorted(actor.last_seen().result()) == ["bonus", "prompt_ids", "response_ids"]


def test_without_required_columns_all_travel():
    actor = group(Model)
    batch = actor.score(actor.generate(prompts()))
    expected = ["uid", "sample_index", "prompt_ids", "answer", "response_ids", "weight_version", "scores", "scored_by"]
    assert sorted(actor.columns_seen(batch).result()) == sorted(expected)


def test_a_missing_column_is_named_with_the_stage_that_needs_it_and_the_call_that_adds_it():
    with pytest.raises(BatchError, match=r"actor\.values.*response_ids") as missing:
        group(Model).values(prompts())
    assert "'response_ids' is added by rollout.generate" in missing.value.remedy


def test_one_rank_reads_the_very_tensors_the_driver_gave():
    actor = group(Model)
    given = prompts(siblings=1)
    assert actor.generate(given).fetch().row("uid").data_ptr() == given.row("uid").data_ptr()


def test_broadcast_answers_come_from_every_rank_and_a_single_one_is_itself():
    assert group(Talker, 3).rank().result() == [0, 1, 2]
    assert group(Talker).rank().result() == 0
    assert group(Talker, 3).nothing().result() is None


def test_a_batch_answered_by_every_rank_is_all_their_rows():
    given = prompts(rows=2, siblings=1)
    batch = group(Model, 2).everyone(given)
    assert len(batch) == 4
    assert batch.fetch().row("echo").tolist() == [0, 0, 1, 1]
    assert group(Model).everyone(given).fetch(["uid", "echo"]).row("uid").tolist() == [100, 101]


def test_tensor_ranks_receive_the_same_part_and_one_of_them_answers():
    mesh = ParallelMesh({"data": 2, "tensor": 2})
    batch = group(Model, 4, mesh=mesh).score(group(Model).generate(prompts(rows=4)))
    assert batch.row("scores").tolist() == [float(i // 2) for i in range(8)]
    assert set(batch.row("scored_by").tolist()) == {0, 2}


def test_generation_is_read_on_the_generation_mesh():
    talker = group(
        Talker,
        4,
        mesh=ParallelMesh({"data": 1, "tensor": 4}),
        generation_mesh=ParallelMesh({"data": 1, "tensor": 2, "micro_data": 2}),
    )
    parts = talker.uids(prompts(rows=4, siblings=1)).result()
    assert len(parts) == 2
    assert sorted(parts[0] + parts[1]) == [100, 101, 102, 103]


def test_per_rank_takes_one_input_a_rank_or_divides_a_batch():
    talker = group(Talker, 3)
    assert talker.add([1, 2, 3], right=[10, 20, 30]).result() == [11, 22, 33]
    assert talker.rows(prompts(rows=3, siblings=2)).result() == [2, 2, 2]
    assert talker.rows([prompts(rows=n, siblings=1) for n in (1, 2, 3)]).result() == [1, 2, 3]
    with pytest.raises(BatchError, match=r"one input per rank.*list of 3"):
        talker.add([1, 2], right=[1, 2, 3])


def test_a_users_protocol_distributes_and_collects(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["custom_protocol.py"])
    custom_protocol.main()
    printed = dict(line.strip().split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["uid"] == "[1, 5, 2, 3, 4, 0]" and printed["rank"] == "[0, 0, 0, 1, 1, 1]"
    assert printed["tokens"] == "[6, 4, 2, 5, 3, 1]" and printed["tokens by rank"] == "{0: 12, 1: 9}"


def test_wait_merges_metrics_and_gives_other_answers_as_they_are():
    actor, talker = group(Model), group(Talker, 2)
    batch = actor.generate(prompts())
    metrics = wait(actor.update(batch), actor.update(batch))
    assert metrics["rows"].value == 24
    assert wait(talker.rank()) == [0, 1]
    assert wait(talker.rank(), talker.nothing()) == ([0, 1], None)


def test_fewer_prompts_than_ranks_is_an_error_with_a_remedy():
    with pytest.raises(BatchError, match=r"2 prompts cannot be divided over the 3 .*'actor'.*data\.batch_size"):
        group(Model, 3).generate(prompts(rows=2, siblings=4))


def test_a_stage_that_loses_a_row_or_a_column_is_named():
    with pytest.raises(WorkerError, match=r"actor\.lose_a_row.*11 rows for the 12.*exactly once"):
        group(Model).lose_a_row(prompts())
    with pytest.raises(WorkerError, match=r"forget_a_column.*scores"):
        group(Model).forget_a_column(prompts())


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'actor' has no method 'generat'.*Did you mean 'generate'"):
        group(Model).generat(prompts())
    with pytest.raises(ConfigError, match="driver cannot call the method 'hidden' of the role 'actor'"):
        group(Talker).hidden()


def test_a_failure_names_role_rank_and_method_and_leads_to_the_frame_that_failed():
    with pytest.raises(WorkerError) as caught:
        group(Talker, 2).fail(1)
    error = caught.value
    assert (error.role, error.rank, error.method) == ("actor", 1, "fail")
    assert "ZeroDivisionError: no such number" in str(error)
    assert "workers.py" in error.worker_traceback
    assert "worker_host.py" not in error.worker_traceback
    assert isinstance(error.__cause__, ZeroDivisionError)
    frame = list(traceback.walk_tb(error.__traceback__))[-1][0]  # where a debugger stops
    assert (frame.f_code.co_name, frame.f_locals["on_rank"]) == ("fail", 1)


def test_an_error_of_the_house_keeps_its_message_and_remedy():
    with pytest.raises(WorkerError, match=r"row 3 is NaN.*Look at the function") as caught:
        group(Talker).fail_with_remedy()
    assert isinstance(caught.value.__cause__, RewardError)


def test_a_worker_that_cannot_be_made_says_why():
    with pytest.raises(WorkerError, match=r"actor\.__init__ failed: FileNotFoundError: no model at /nowhere"):
        group(Broken, kwargs={"path": "/nowhere"})


def test_a_view_calls_the_same_workers_under_another_name():
    actor = group(Model)
    rollout = actor.view("rollout", methods={"seen": "last_seen"})
    rollout.generate(prompts())
    assert actor.last_seen().result() == rollout.seen().result() == ["prompt_ids"]
    with pytest.raises(WorkerError, match=r"rollout\.lose_a_row"):
        rollout.lose_a_row(prompts())


def test_a_linked_call_calls_the_other_group_as_well():
    sender, receiver = group(Talker, 2), group(Talker, 3)
    sender.link("remember", receiver, "remember")
    assert sender.remember("weights").result() is None
    assert receiver.recall().result() == ["weights"] * 3
    assert sender.rank().result() == [0, 1]


def test_ranks_learn_how_many_of_their_rows_each_minibatch_has():
    batch = prompts(rows=6, siblings=1)
    actor = group(Model, 2, minibatch_rows=4)
    first, second = actor.minibatches(batch).result()
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [[100, 101, 102, 103], [104, 105]]
    assert group(Model, 1, minibatch_rows=4).minibatches(batch).result() == [list(range(100, 106))]


def test_a_mesh_must_have_the_ranks_of_its_pool():
    with pytest.raises(ConfigError, match=r"'actor' has 2 ranks, but pool 'main' has 3 devices"):
        group(Model, 3, mesh=ParallelMesh({"data": 2}))


def test_a_future_of_a_value_is_no_argument():
    talker = group(Talker)
    with pytest.raises(BatchError, match=r"future.*result\(\)"):
        talker.sleep(talker.rank())


def beside(rows: int, first: int = 0) -> Batch:
    return Batch.of(rows={"uid": torch.arange(first, first + rows), "unwanted": torch.zeros(rows)})


@pytest.mark.parametrize("devices", [2, 3])
def test_a_batch_beside_is_divided_by_itself_into_as_many_minibatches(devices):
    answers = group(Model, devices, minibatch_rows=8).both(prompts(rows=12), beside(25)).result()
    for number in range(3):
        left = sorted(uid for rank in answers for uid in rank[number][0])
        right = sorted(uid for rank in answers for uid in rank[number][1])
        assert left == sorted(2 * list(range(100 + 4 * number, 104 + 4 * number)))
        assert right == list(range((0, 9, 17)[number], (9, 17, 25)[number]))
        assert all(rank[number][1] for rank in answers)


def test_a_method_with_a_batch_beside_can_be_called_without_one():
    assert group(Model).both(prompts(rows=2, siblings=1)).result() == [([100, 101], [])]
    answer = group(Model, minibatch_rows=24).both(prompts(rows=12), beside(5)).result()
    assert [right for _, right in answer] == [[0, 1, 2, 3, 4]]


def test_too_few_rows_beside_are_told():
    with pytest.raises(BatchError, match=r"second batch of 5 rows .* 3 minibatches .* 2 data-parallel ranks") as caught:
        group(Model, 2, minibatch_rows=8).both(prompts(rows=12), beside(5))
    assert "6 rows or more" in caught.value.remedy


def test_a_batch_beside_needs_its_own_columns_alone():
    with pytest.raises(BatchError, match=r"actor\.both.*\['uid'\]"):
        group(Model).both(prompts(), Batch.of(rows={"scores": torch.zeros(6)}))
