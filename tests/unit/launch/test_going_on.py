"""What an interrupted run says about going on is true for its `trainer.resume`."""

import pytest

from hybridflow.dataflows.loop import Outcome, Stopped
from hybridflow.launch.going_on import ending_of


@pytest.mark.parametrize(
    ("resume", "saved", "said"),
    [
        ("auto", 2, "saved step 2: the same command resumes from it."),
        ("never", 2, "saved step 2: to resume from it, set trainer.resume=auto."),
        ("other/step_1", 2, "saved step 2: to resume from it, set trainer.resume=auto."),
        ("auto", 1, "step 2 is not saved: the same command resumes from the last checkpoint, step 1."),
        ("never", 1, "step 2 is not saved: to resume from the last checkpoint, step 1, set trainer.resume=auto."),
        ("auto", 0, "No checkpoint was saved. The same command starts from the beginning."),
        ("never", 0, "No checkpoint was saved. The same command starts from the beginning."),
    ],
)
def test_the_words_follow_trainer_resume(tmp_path, resume, saved, said):
    checkpoint = tmp_path / "checkpoints" / f"step_{saved}" if saved else None
    outcome = Outcome(2, {}, checkpoint, Stopped("SIGTERM", saved, "step 3"))
    assert ending_of(outcome, tmp_path, resume).said == f"{said} step 3 was abandoned."


def test_the_checkpoint_of_another_run_is_none_of_this_one(tmp_path):
    resume = str(tmp_path / "other" / "checkpoints" / "step_2")
    outcome = Outcome(2, {}, tmp_path / "other" / "checkpoints" / "step_2", Stopped("SIGTERM", 2))
    said = ending_of(outcome, tmp_path / "run", resume).said
    assert said == f"No checkpoint was saved. The same command starts from trainer.resume={resume} again."


def test_a_checkpoint_behind_a_link_is_of_this_run(tmp_path):
    (tmp_path / "disk" / "step_2").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    outcome = Outcome(2, {}, tmp_path / "run" / "checkpoints" / "step_2", Stopped("SIGTERM", 2))
    assert ending_of(outcome, tmp_path / "run", "auto").said == "saved step 2: the same command resumes from it."
