"""The last lines of a run that was stopped at once."""

from io import StringIO

from rich.console import Console

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.launch.farewell import say_kept, say_stopped_at_once
from tests.unit.elastic.parts import written_by


def said(run_dir):
    text = StringIO()
    say_stopped_at_once(run_dir, Console(file=text, width=200))
    return text.getvalue()


def test_a_run_stopped_at_once_names_its_report_and_its_last_whole_checkpoint(tmp_path):

    def write(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "weights").write_text("1")
        return written_by(directory, "actor")

    CheckpointStore(tmp_path).save(3, write, driver_state={})
    CheckpointStore(tmp_path).save(4, write, driver_state={})
    (tmp_path / "checkpoints" / "step_4" / "actor" / "weights").unlink()
    (tmp_path / "report.html").write_text("")
    lines = said(tmp_path)
    assert "resumes from the last checkpoint, step 3" in lines
    assert f"report      {tmp_path / 'report.html'}" in lines
    assert f"checkpoint  {tmp_path / 'checkpoints' / 'step_3'}" in lines
    assert "step_4" not in lines
    kept = StringIO()
    say_kept(tmp_path, Console(file=kept, width=200))
    assert f"checkpoint  {tmp_path / 'checkpoints' / 'step_3'}  (the same command resumes from it" in kept.getvalue()


def test_without_either_it_begins_anew(tmp_path):
    assert said(tmp_path).split("  ", 1)[1] == "No checkpoint was saved. The same command starts from the beginning.\n"
