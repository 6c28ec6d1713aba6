"""The last lines of a run: its evaluations, what is left of one that was stopped, and how it is resumed."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hybridflow.dataflows.run import Outcome, Stopped
from hybridflow.launch.messages import Finished, ending_of, say_finished, say_kept, say_stopped_at_once
from hybridflow.observability.ending import Ending
from tests.unit.elastic.victim import store_with


def said(run_dir, resume="auto"):
    text = StringIO()
    say_stopped_at_once(run_dir, resume, Console(file=text, width=200))
    return text.getvalue()


def test_a_run_stopped_at_once_names_its_report_and_its_last_whole_checkpoint(tmp_path):
    store_with(tmp_path, 3, 4)
    (tmp_path / "checkpoints" / "step_4" / "driver.json").unlink()
    (tmp_path / "report.html").write_text("")
    lines = said(tmp_path)
    assert "resumes from the last checkpoint, step 3" in lines
    assert f"report      {tmp_path / 'report.html'}" in lines
    assert f"checkpoint  {tmp_path / 'checkpoints' / 'step_3'}" in lines
    assert "step_4" not in lines
    kept = StringIO()
    say_kept(tmp_path, "auto", Console(file=kept, width=200))
    assert f"checkpoint  {tmp_path / 'checkpoints' / 'step_3'}  (the same command resumes from it" in kept.getvalue()
    assert "interrupted  to resume from the last checkpoint, step 3, set trainer.resume=auto" in said(tmp_path, "never")
    say_kept(tmp_path, "never", Console(file=kept, width=200))
    assert "step_3  (to resume from it, set trainer.resume=auto; if you change" in kept.getvalue()


def test_without_either_it_begins_anew(tmp_path):
    assert said(tmp_path).split("  ", 1)[1] == "No checkpoint was saved. The same command starts from the beginning.\n"
    assert "The same command starts from trainer.resume=other/step_4 again." in said(tmp_path, "other/step_4")


@pytest.mark.parametrize(
    ("evaluated", "value", "line"),
    [
        ((0, 30), 0.594, "sums exact match  0.594  from 0.438"),
        ((0, 25), 0.594, "sums exact match  0.594 at step 25, from 0.438"),
        ((0, 30), 0.0165, "sums exact match  0.0165  from 0.438"),
        ((0, 30), 0.0, "sums exact match  0  from 0.438"),
        ((0, 0), 0.438, "sums exact match  0.438 at step 0"),
        ((30, 30), 0.438, "sums exact match  0.438 at step 30"),
    ],
)
def test_the_last_evaluation_is_said_with_its_step_unless_it_is_the_last_of_several(tmp_path, evaluated, value, line):
    name = "val-core/sums/acc/mean@1"
    outcome = Outcome(30, {name: value}, None, None, evaluated)
    text = StringIO()
    say_finished(
        Finished(outcome, Ending("done", "30 steps"), tmp_path, None, {name: 0.438}), Console(file=text, width=200)
    )
    assert text.getvalue().splitlines()[1].strip() == line


@pytest.mark.parametrize(
    ("resume", "saved", "said"),
    [
        ("auto", 2, "saved step 2: the same command resumes from it."),
        ("never", 2, "saved step 2: to resume from it, set trainer.resume=auto."),
        ("other/step_1", 2, "saved step 2: to resume from it, set trainer.resume=auto."),
        ("auto", 1, "step 2 is not saved: the same command resumes from the last checkpoint, step 1."),
        ("never", 1, "step 2 is not saved: to resume from the last checkpoint, step 1, set trainer.resume=auto."),
        ("auto", 0, "No checkpoint was saved. The same command starts from the beginning."),
    ],
)
def test_the_words_follow_trainer_resume(tmp_path, resume, saved, said):
    checkpoint = tmp_path / "checkpoints" / f"step_{saved}" if saved else None
    outcome = Outcome(2, {}, checkpoint, Stopped("SIGTERM", saved, "step 3"))
    assert ending_of(outcome, tmp_path, resume).said == f"{said} Step 3 was abandoned."
    outcome = replace(outcome, stopped=Stopped("SIGTERM", saved, "step 3", loses_steps=True))
    assert "Step 3 was abandoned in its update" in (lost := ending_of(outcome, tmp_path, resume).said)
    assert lost.endswith("raise trainer.stop_seconds, or lower trainer.save_every.")


def test_a_checkpoint_behind_a_link_is_of_this_run_and_one_of_another_run_is_not(tmp_path):
    (tmp_path / "disk" / "step_2").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    outcome = Outcome(2, {}, tmp_path / "run" / "checkpoints" / "step_2", Stopped("SIGTERM", 2))
    assert ending_of(outcome, tmp_path / "run", "auto").said == "saved step 2: the same command resumes from it."
    resume = str(tmp_path / "other" / "checkpoints" / "step_2")
    said = ending_of(Outcome(2, {}, Path(resume), Stopped("SIGTERM", 2)), tmp_path / "run", resume).said
    assert said == f"No checkpoint was saved. The same command starts from trainer.resume={resume} again."
