"""Groups without a signal are replaced from the stream: DAPO draws none while it learns."""

from dataclasses import replace

import pytest

from hybridflow.dataflows import group_stream
from hybridflow.dataflows.dapo import DAPO
from hybridflow.dataflows.loop import Loop
from tests.unit.dataflows.programs import numbers
from tests.unit.dataflows.test_ahead import STEPS, consumed, same
from tests.unit.dataflows.test_group_stream import GROUPS, rows_of, streamed


@pytest.fixture(autouse=True)
def looks_at_every_token(monkeypatch):
    monkeypatch.setattr(group_stream, "TURN_TOKENS", 1)


def filtering(toy_dir, run_dir, *, max_refills=10, **settings):
    run = streamed(toy_dir(), run_dir, DAPO, reward="float(ids[0] % 4)", **settings)
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
    assert last["async/groups/discarded"] == last["async/rejected/filtered"] + last["async/rejected/stale"]
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
