"""Groups without a signal are replaced from the stream: DAPO draws none while it learns."""

import random
from dataclasses import replace

import pytest

from hybridflow.config.asynchrony import OnDeadline, WhenStale
from hybridflow.dataflows import group_filter, group_stream
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.loop import Loop
from hybridflow.errors import ConfigError
from tests.unit.dataflows.programs import numbers
from tests.unit.dataflows.test_ahead import STEPS, consumed, same
from tests.unit.dataflows.test_group_stream import GROUPS, rows_of, streamed


@pytest.fixture(autouse=True)
def looks_at_every_token(monkeypatch):
    monkeypatch.setattr(group_stream, "TURN_TOKENS", 1)


def filtering(toy_dir, run_dir, *, max_refills=10, reward="float(ids[0] % 4)", **settings):
    run = streamed(toy_dir(), run_dir, DAPO, reward=reward, **settings)
    run.dataflow.settings.max_refills = max_refills
    return run


def spreads(run):
    """For each row of a step, whether the scores of its group differ, as `learn` sees them."""
    found, learn = [], type(run.dataflow).learn

    def noted(self, batch):
        groups = batch.row("scores").reshape(-1, self.samples_per_prompt)
        found.append((groups.max(1).values > groups.min(1).values).tolist())
        return learn(self, batch)

    type(run.dataflow).learn = noted
    return found


@pytest.mark.parametrize(("staleness", "ahead"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_steps_learn_from_groups_with_a_signal_and_draw_none_themselves(toy_dir, tmp_path, staleness, ahead, devices):
    run = filtering(toy_dir, tmp_path, staleness=staleness, ahead=ahead, steps=8)
    run, found = replace(run, num_devices=devices), spreads(run)
    type(run.dataflow).refill = None  # calling it would fail
    assert Loop(run).run().steps == 8
    assert found == [[True] * GROUPS] * 8
    rows, last = rows_of(run), rows_of(run)[-1]
    assert last["async/rejected/filtered"] > 0
    assert last["async/groups/consumed"] == GROUPS * 8
    assert last["async/groups/discarded"] == last["async/rejected/filtered"]
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] + last["async/tokens/discarded"]
    filtered = [row["async/filtered_fraction"] for row in rows]
    assert sum(GROUPS * f / (1 - f) for f in filtered) == pytest.approx(last["async/rejected/filtered"])
    assert max(row["async/staleness/max"] for row in rows) <= staleness
    assert all(row["dapo/groups_kept"] == GROUPS and "dapo/refills" not in row for row in rows)


def test_at_the_limit_groups_without_a_signal_fill_the_step(toy_dir, tmp_path, caplog):
    run = filtering(toy_dir, tmp_path, max_refills=0, staleness=1)
    found = spreads(run)
    Loop(run).run()
    rows = rows_of(run)
    assert rows[-1]["async/rejected/filtered"] == 0 and sorted(consumed(run)) == list(range(GROUPS * STEPS))
    assert [row["dapo/groups_without_signal"] for row in rows] == [GROUPS - sum(each) for each in found]
    assert "dataflow_settings.max_refills=0" in caplog.text


def test_a_run_replays_and_resumes(toy_dir, tmp_path):
    whole = filtering(toy_dir, tmp_path / "whole", save_every=1)
    Loop(whole).run()
    again = filtering(toy_dir, tmp_path / "again", replay=str(tmp_path / "whole"))
    Loop(again).run()
    assert same(whole, again) and numbers(whole) == numbers(again)
    learned = [uids for half, _, _, uids in whole.dataflow.halves if half == "learn"]
    for step in range(1, STEPS):
        resumed = filtering(toy_dir, tmp_path / f"resumed_{step}")
        found, loop = spreads(resumed), Loop(resumed)
        loop.resume(whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / f"step_{step}"))
        loop.run()
        before = [uid for uids in learned[:step] for uid in uids]
        after = [*consumed(resumed).elements()]
        assert len({*before, *after}) == len(before) + len(after) == GROUPS * STEPS
        assert all(all(flags) for flags in found)
        assert rows_of(resumed)[-1]["async/groups/consumed"] == GROUPS * STEPS


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 60))])
def test_a_run_with_any_settings_reaches_its_last_step(toy_dir, tmp_path, seed):
    draw = random.Random(seed)
    ahead, devices, fraction = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4]), draw.choice([0.3, 0.6, 0.85])
    settings = draw.choice([{}, *({"deadline_tokens": n, "on_deadline": o} for n in (1, 3) for o in OnDeadline)])
    if settings == {"deadline_tokens": 1, "on_deadline": OnDeadline.replace}:  # which leaves no long response
        settings["deadline_tokens"] = 2
    staleness, when = ahead + draw.choice([0, 1]), draw.choice([*WhenStale])
    run = filtering(toy_dir, tmp_path, staleness=staleness, ahead=ahead, steps=8, when_stale=when, **settings)
    run = replace(run, num_devices=devices, rollout_overlaps=draw.random() < 0.5)

    def filter_out(self, batch, **_):
        return [uid for uid in batch.row("uid").unique().tolist() if random.Random(uid + seed).random() < fraction]

    type(run.dataflow).filter_out = filter_out
    assert Loop(run).run().steps == 8
    last = rows_of(run)[-1]
    assert last["async/groups/consumed"] == GROUPS * 8
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] + last["async/tokens/discarded"]
    if when is WhenStale.wait:
        assert last["async/rejected/stale"] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("alone_until", [3, 6])
def test_groups_that_are_generated_one_step_at_a_time_after_a_fault_reach_all_devices(toy_dir, tmp_path, alone_until):
    run = replace(filtering(toy_dir, tmp_path, staleness=2, deadline_tokens=3), num_devices=3)
    type(run.dataflow).filter_out = lambda self, batch, **_: [
        uid for uid in batch.row("uid").unique().tolist() if uid % 3
    ]
    loop = Loop(run)
    loop._ahead._alone_until = alone_until
    assert loop.run().steps == STEPS


def test_at_most_max_refills_batches_are_filtered_out_in_a_step(toy_dir, tmp_path):
    run = filtering(toy_dir, tmp_path, max_refills=1, staleness=3, ahead=3, reward="0.0")
    Loop(run).run()
    assert max(row["async/filtered_fraction"] for row in rows_of(run)) == 0.5
    assert {row["dapo/groups_without_signal"] for row in rows_of(run)} == {GROUPS}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda batch: None, "filter_out returned NoneType"),
        (lambda batch: "3", "filter_out returned str"),
        (lambda batch: [-1], "filter_out returned -1, which is not the uid of a group of the batch"),
        (lambda batch: [0.0], "filter_out returned 0.0, which is not the uid of a group of the batch"),
        (lambda batch: batch.row("scores") < 0.5, "filter_out returned True or False for each row"),
        (lambda batch: [False] * len(batch), "filter_out returned True or False for each row"),
    ],
)
def test_a_filter_that_returns_anything_else_is_an_error_at_its_first_call(toy_dir, tmp_path, found, words):
    run = filtering(toy_dir, tmp_path)
    calls = []
    type(run.dataflow).filter_out = lambda self, batch, **_: calls.append(batch) or found(batch)
    with pytest.raises(ConfigError, match=words) as caught:
        Loop(run).run()
    assert "batch.row('uid')[mask].tolist()" in caught.value.remedy and len(calls) == 1


def test_a_filter_that_keeps_nothing_ends_the_run(toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(group_filter, "MOST_BATCHES_IN_A_ROW", 5)
    run = filtering(toy_dir, tmp_path, max_refills=3)
    type(run.dataflow).filter_out = lambda self, batch, **_: batch.row("uid")
    with pytest.raises(ConfigError, match=r"filter_out has returned each of the last 2\d groups") as caught:
        Loop(run).run()
    assert caught.value.remedy.startswith("Check which groups filter_out returns")


def test_max_refills_may_be_more_than_the_batches_that_another_filter_may_return(toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(group_filter, "MOST_BATCHES_IN_A_ROW", 1)
    run = filtering(toy_dir, tmp_path, max_refills=3, staleness=3, ahead=3, reward="0.0")
    Loop(run).run()
    assert max(row["async/filtered_fraction"] for row in rows_of(run)) == 0.75
