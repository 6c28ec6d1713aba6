"""Groups that are generated across updates: staleness, accounts, replay, deadlines, resuming, and faults."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.asynchrony import OnDeadline, WhenStale
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.dataflows import discards, group_stream
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.grpo import GRPO
from hybridflow.dataflows.loop import Loop
from hybridflow.dataflows.ppo import PPO
from hybridflow.dataflows.remax import ReMax
from hybridflow.dataflows.run import Run
from hybridflow.dataflows.safe_rlhf import SafeRLHF
from hybridflow.dataflows.schedule import SCHEDULE_FILE, recorded_steps
from hybridflow.errors import CheckpointError, ConfigError, HybridflowError, NumericError
from tests.unit.dataflows.programs import numbers
from tests.unit.dataflows.test_ahead import STEPS, consumed, run_of, same, surviving

LONG = 6
"""Tokens of the responses to every fourth prompt; the others have one."""

GROUPS = 4
LENGTHS = (1, 1, 1, LONG)


@pytest.fixture(autouse=True)
def looks_at_every_token(monkeypatch):
    monkeypatch.setattr(group_stream, "TURN_TOKENS", 1)


def streamed(
    directory: Path,
    run_dir: Path,
    kind=GRPO,
    *,
    staleness=2,
    ahead=1,
    reward="float(ids[0] % 2)",
    **settings,
) -> Run:
    sizes = {name: settings.pop(name) for name in ("steps", "save_every") if name in settings}
    run = run_of(directory, run_dir, kind, staleness=staleness, ahead=ahead, reward=reward, **sizes)
    engine = engine_of(run)
    start = engine._start

    def with_lengths(requests):
        for request in requests:
            request.max_response_tokens = LENGTHS[request.name[0] % GROUPS]
        start(requests)

    engine._start = with_lengths
    return replace(run, asynchrony=replace(run.asynchrony, partial_rollouts=True, **settings))


def engine_of(run: Run):
    [host] = run.calls._hosts[run.learners["actor"].pool]
    return host.workers["actor"].rollout.engine


def rows_of(run: Run) -> list[dict[str, float]]:
    return [row for step, row in numbers(run).items() if step]


@pytest.mark.parametrize(
    ("kind", "staleness", "ahead"), [(GRPO, 1, 1), (GRPO, 3, 2), (PPO, 2, 1), (DAPO, 2, 2), (ReMax, 2, 1)]
)
def test_t4_each_prompt_is_trained_on_once_and_no_token_is_too_old(toy_dir, tmp_path, kind, staleness, ahead):
    run = streamed(toy_dir(), tmp_path, kind, staleness=staleness, ahead=ahead)
    assert Loop(run).run().steps == STEPS
    rows = rows_of(run)
    assert 0 < max(row["async/staleness/max"] for row in rows) <= staleness
    assert max(row["async/versions_per_response"] for row in rows) > 1.0
    assert max(row["async/interrupted_fraction"] for row in rows) > 0.0
    assert sum(row["async/reprefill_tokens"] for row in rows) > 0
    assert rows[-1]["async/groups/done"] == rows[-1]["async/groups/running"] == 0
    assert max(consumed(run).values()) == 1
    if kind is not DAPO:
        assert sorted(consumed(run)) == list(range(GROUPS * STEPS))
    last = rows[-1]
    assert last["async/groups/consumed"] == GROUPS * STEPS
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] + last["async/tokens/discarded"] > 0
    assert engine_of(run).num_running == 0


@pytest.mark.parametrize(("staleness", "ahead"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("devices", [2, 3, 8])
def test_t4_no_fewer_groups_than_devices_are_left_to_be_collected(toy_dir, tmp_path, staleness, ahead, devices):
    run = replace(streamed(toy_dir(), tmp_path, staleness=staleness, ahead=ahead), num_devices=devices)
    assert Loop(run).run().steps == STEPS
    assert sorted(consumed(run)) == list(range(GROUPS * STEPS)) and max(consumed(run).values()) == 1


@pytest.mark.parametrize("kind", [GRPO, SafeRLHF])
def test_a_run_replays_bit_for_bit(toy_dir, tmp_path, kind):
    first = streamed(toy_dir(), tmp_path / "first", kind)
    Loop(first).run()
    again = streamed(toy_dir(), tmp_path / "again", kind, replay=str(tmp_path / "first"))
    Loop(again).run()
    assert same(first, again) and numbers(first) == numbers(again)
    files = [(tmp_path / name / SCHEDULE_FILE).read_text() for name in ("first", "again")]
    assert files[0] == files[1] and len(recorded_steps(tmp_path / "first")) == STEPS


def test_a_replay_that_trains_on_other_groups_is_an_error(toy_dir, tmp_path):
    Loop(streamed(toy_dir(), tmp_path / "first", staleness=1)).run()
    again = streamed(toy_dir(), tmp_path / "again", staleness=3, ahead=3, replay=str(tmp_path / "first"))
    with pytest.raises(HybridflowError, match="trains on the groups") as caught:
        Loop(again).run()
    assert "with its settings" in caught.value.remedy


@pytest.mark.parametrize("overlaps", [False, True])
def test_t6_a_run_that_resumes_at_any_step_trains_on_each_prompt_once(toy_dir, tmp_path, overlaps):
    """If the rollout generates while a step learns, groups have finished and are not scored when the step ends."""
    whole = replace(streamed(toy_dir(), tmp_path / "whole", ahead=2, save_every=1), rollout_overlaps=overlaps)
    Loop(whole).run()
    found = []
    learnt = [uids for half, _, _, uids in whole.dataflow.halves if half == "learn"]
    for step in range(1, STEPS):
        again = replace(streamed(toy_dir(), tmp_path / f"again_{step}", ahead=2), rollout_overlaps=overlaps)
        loop = Loop(again)
        checkpoint = whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / f"step_{step}")
        state = checkpoint.driver_state()["ahead"]
        states = {row["state"] for row in state["groups"]}
        found.append("finished" in state)
        assert states <= {"waiting", "running", "done"} and (step == STEPS - 1 or "running" in states)
        loop.resume(checkpoint)
        loop.run()
        before = [uid for uids in learnt[:step] for uid in uids]
        assert sorted([*before, *consumed(again)]) == list(range(GROUPS * STEPS))
        assert max(row["async/staleness/max"] for row in rows_of(again)) <= 2
        assert max(row["async/groups/running"] + row["async/groups/done"] for row in rows_of(again)) <= 2 * GROUPS
        assert rows_of(again)[-1]["async/groups/consumed"] == GROUPS * STEPS
        assert rows_of(again)[-1]["async/length_ratio"] == 1.0  # all responses have been trained on
    assert any(found) == overlaps
    with pytest.raises(ConfigError, match="was resumed"):
        (tmp_path / "resumed").mkdir()
        (tmp_path / "resumed" / SCHEDULE_FILE).write_text('{"resumed": true}\n')
        recorded_steps(tmp_path / "resumed")


@pytest.mark.parametrize("half", ["collect", "learn"])
def test_t6_only_the_batch_that_causes_faults_is_left_out(toy_dir, tmp_path, half):
    steps = STEPS + 2
    run = streamed(toy_dir(), tmp_path, ahead=2, save_every=1, steps=steps)
    run = surviving(run, tmp_path, numeric="roll_back")
    kind = type(run.dataflow)
    original, trained = getattr(GRPO, half), []

    def failing(self, batch):
        if 13 in batch.row("uid").tolist():
            if half == "collect":
                self.rollout.generate(batch.repeat(self.samples_per_prompt))
            raise NumericError("the loss is nan", remedy="lower")
        return original(self, batch)

    setattr(kind, half, failing)
    learn = kind.learn

    def noted(self, batch):
        metrics = learn(self, batch)
        trained.append((self.iteration, batch.row("uid").unique().tolist()))
        return metrics

    kind.learn = noted
    assert Loop(run).run().steps == steps
    final = dict(trained)  # the last time that each step was taken
    uids = sorted(uid for own in final.values() for uid in own)
    assert len(uids) == len(set(uids)) == GROUPS * steps and 13 not in uids
    last = rows_of(run)[-1]
    assert last["async/groups/consumed"] == GROUPS * steps
    assert last["async/rejected/fault"] == last["async/groups/discarded"] == GROUPS
    assert last["async/tokens/discarded"] == 0


def test_t5_dropped_groups_are_counted_and_their_places_filled(toy_dir, tmp_path):
    run = streamed(toy_dir(), tmp_path, staleness=1, steps=8, when_stale=WhenStale.drop)
    Loop(run).run()
    last = rows_of(run)[-1]
    assert last["async/groups/consumed"] == GROUPS * 8
    assert last["async/rejected/stale"] == last["async/groups/discarded"] > 0
    assert last["async/tokens/generated"] == last["async/tokens/consumed"] + last["async/tokens/discarded"]
    assert max(row["async/staleness/max"] for row in rows_of(run)) <= 1
    assert last["async/length_ratio"] < 1.0  # only long ones are dropped


@pytest.mark.parametrize("kind", [GRPO, SafeRLHF, ReMax])
def test_tokens_that_are_too_old_are_left_out_of_the_loss(toy_dir, tmp_path, kind):
    run = streamed(toy_dir(), tmp_path, kind, staleness=1, steps=8, when_stale=WhenStale.mask)
    masks = []
    learn = kind.learn

    def noted(self, batch):
        for each in (batch, *batch.companions.values()):
            masks.append((self.iteration, each.fetch(["response_mask", "version_runs", "weight_version"])))
        return learn(self, batch)

    type(run.dataflow).learn = noted
    Loop(run).run()
    assert sum(row["async/masked_tokens"] for row in rows_of(run)) > 0
    for step, batch in masks:
        rows = zip(batch.tokens("response_mask").rows(), batch.tokens("version_runs").rows(), strict=True)
        for row, (mask, runs) in enumerate(rows):
            ends = [*runs[1:, 1].tolist(), len(mask)]
            ages = [
                step - version
                for (version, first), end in zip(runs.tolist(), ends, strict=True)
                for _ in range(first, end)
            ]
            assert mask.tolist() == [float(age <= 1) for age in ages]
            kept = [age for age in ages if age <= 1]
            assert batch.row("weight_version")[row] == step - max(kept, default=1)


@pytest.mark.parametrize("policy", [*OnDeadline])
def test_t10_a_straggler_meets_its_deadline_and_is_counted(toy_dir, tmp_path, policy):
    run = streamed(toy_dir(), tmp_path, staleness=3, deadline_tokens=3, on_deadline=policy, save_every=1)
    Loop(run).run()
    last = rows_of(run)[-1]
    assert last["async/groups/consumed"] == GROUPS * STEPS
    if policy is OnDeadline.truncate:
        assert last["async/groups/truncated"] > 0 == last["async/groups/discarded"]
        assert max(row["response_length/max"] for row in rows_of(run)) < LONG
        assert sorted(consumed(run)) == list(range(GROUPS * STEPS))
    else:
        assert last["async/rejected/deadline"] == last["async/groups/discarded"] > 0
        assert not any(uid % GROUPS == 3 for uid in consumed(run))
    again = streamed(toy_dir(), tmp_path / "again", staleness=3, deadline_tokens=3, on_deadline=policy)
    loop = Loop(again)
    loop.resume(run.checkpoints.open(tmp_path / "checkpoints" / "step_2"))
    assert loop.run().steps == STEPS


def test_a_run_that_can_use_no_group_ends_with_a_sentence(toy_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(discards, "MOST_IN_A_ROW", 40)
    run = streamed(toy_dir(), tmp_path, staleness=3, deadline_tokens=1, on_deadline=OnDeadline.replace)
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (LONG,) * GROUPS)
    with pytest.raises(ConfigError, match="80 groups were discarded one after another") as caught:
        Loop(run).run()
    assert caught.value.message.startswith("asynchrony.on_deadline=replace asynchrony.deadline_tokens=1:")
    assert "Raise asynchrony.deadline_tokens, or use asynchrony.on_deadline=truncate." in caught.value.remedy


def test_the_ratio_of_lengths_continues_when_a_run_resumes(toy_dir, tmp_path):
    settings = {"staleness": 1, "steps": 8, "when_stale": WhenStale.drop}
    whole = streamed(toy_dir(), tmp_path / "whole", save_every=1, **settings)
    Loop(whole).run()
    again = streamed(toy_dir(), tmp_path / "again", **settings)
    loop = Loop(again)
    loop.resume(whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / "step_6"))
    loop.run()
    before = rows_of(whole)[5]["async/length_ratio"]
    assert before < 0.95  # without the steps before, the ratio would begin again near 1
    assert rows_of(again)[0]["async/length_ratio"] == pytest.approx(before, abs=0.08)


@pytest.mark.parametrize("what", ["no samples", "other rows", "greedy first"])
def test_collect_that_does_not_ask_for_samples_of_its_prompts_is_an_error(toy_dir, tmp_path, what):
    run = streamed(toy_dir(), tmp_path)

    def collect(self, prompts):
        if what == "other rows":
            return self.rollout.generate(prompts.slice(0, 1).repeat(2))
        if what == "greedy first":
            self.rollout.generate(prompts.repeat(1), purpose="greedy")
        return BatchRef.of(prompts, run.calls)

    type(run.dataflow).collect = collect
    expected = {"no samples": "does not call rollout.generate", "other rows": "which are not samples of"}
    with pytest.raises(ConfigError, match=expected.get(what, "purpose='greedy'")) as caught:
        Loop(run).run()
    assert "asynchrony.partial_rollouts=false" in caught.value.remedy


def test_a_run_resumes_from_whole_batches_and_not_the_other_way_round(toy_dir, tmp_path):
    whole = run_of(toy_dir(), tmp_path / "whole", staleness=2, ahead=2, save_every=1)
    Loop(whole).run()
    again = streamed(toy_dir(), tmp_path / "again", save_every=1)
    loop = Loop(again)
    loop.resume(whole.checkpoints.open(tmp_path / "whole" / "checkpoints" / "step_2"))
    loop.run()
    assert sorted(consumed(again)) == list(range(GROUPS * 2, GROUPS * STEPS)) and max(consumed(again).values()) == 1
    back = Loop(run_of(toy_dir(), tmp_path / "back", staleness=2, ahead=2))
    with pytest.raises(CheckpointError, match="single groups") as caught:
        back.resume(again.checkpoints.open(tmp_path / "again" / "checkpoints" / "step_3"))
    assert "asynchrony.partial_rollouts=true" in caught.value.remedy
