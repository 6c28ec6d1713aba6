"""Disks that fail for a moment, and checkpoints that are damaged while a run continues: nothing is lost."""

from dataclasses import replace

from hybridflow.dataflows.loop import Loop
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.errors import ResourceError, RewardError
from hybridflow.observability.metrics import last
from tests.unit.dataflows.test_recovery import failing, faults_of


def test_a_checkpoint_that_cannot_be_written_is_written_again(toy_dir, tmp_path, monkeypatch):
    run, save, failed = failing(toy_dir(), tmp_path / "run", None, storage="retry"), CheckpointStore.save, []

    def save_at_second_attempt(store, step, *args, **kwargs):
        if step == 4 and not failed:
            failed.append(step)
            raise OSError(28, "No space left on device")
        return save(store, step, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", save_at_second_attempt)
    assert Loop(run).run().steps == 6 and failed == [4]
    [fault] = faults_of(tmp_path / "run")
    assert (fault["kind"], fault["fault"], fault["resumed_step"]) == ("storage", "OSError", 4)
    assert [path.name for path in run.checkpoints.paths()][-1] == "step_6"


def test_a_row_that_cannot_be_written_is_written_later_and_its_step_is_evaluated_once(toy_dir, tmp_path):
    run = failing(toy_dir(), tmp_path / "run", None, storage="retry")
    log, evaluations, failed = run.tracker.log, [], []

    def log_at_second_attempt(step, metrics):
        if step == 4 and not failed:
            failed.append(step)
            raise ResourceError("The disk is full", remedy="free some space")
        log(step, metrics)

    def evaluate():
        evaluations.append(run.dataflow.iteration)
        return {"val/score": last(1.0)}, []

    run.tracker.log = log_at_second_attempt  # pyright: ignore[reportAttributeAccessIssue]
    trainer = replace(run.trainer, eval_every=2)
    assert Loop(replace(run, trainer=trainer, evaluations=[evaluate])).run().steps == 6
    assert failed == [4] and [step for step, row in run.tracker.rows.items() if "val/score" in row] == [0, 2, 4, 6]
    assert [*run.tracker.rows] == [*range(7)] and len(evaluations) == 4
    [fault] = faults_of(tmp_path / "run")
    assert (fault["kind"], fault["resumed_step"]) == ("storage", 4)


def test_a_damaged_checkpoint_is_replaced_by_an_older_one(toy_dir, tmp_path, caplog):
    run = failing(toy_dir(), tmp_path / "run", RewardError("no answer", remedy="wait"), save_every=1, user_code="retry")
    run = replace(run, trainer=replace(run.trainer, async_save=False))
    step = run.dataflow.step

    def damaging(prompts):
        if run.dataflow.iteration == 3 and run.dataflow.times:
            (run.checkpoints.place(3) / "driver.json").write_text("{}")
        return step(prompts)

    run.dataflow.step = damaging  # pyright: ignore[reportAttributeAccessIssue]
    assert Loop(run).run().steps == 6
    assert "step_3 is skipped" in caplog.text and faults_of(tmp_path / "run")[0]["resumed_step"] == 2
