"""Trackers: what they write, how they resume, how they fail."""

import errno
import json
import logging
import os
import sys
from contextlib import closing
from io import StringIO

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.event_file_writer import AtomicCounter

from hybridflow.errors import MissingExtraError, ResourceError
from hybridflow.observability.jsonlines import read_rows
from hybridflow.observability.progress import Progress
from hybridflow.observability.samples import Sample
from hybridflow.observability.trackers.console import ConsoleTracker
from hybridflow.observability.trackers.factory import make_trackers, unknown_trackers
from hybridflow.observability.trackers.interface import FanoutTracker, TrackedRun, Tracker
from hybridflow.observability.trackers.jsonl import JsonlTracker
from hybridflow.observability.trackers.tensorboard import TensorBoardTracker


def _run(run_dir, **options):
    return TrackedRun(run_dir, Progress(10, console=Console(file=StringIO(), width=100), is_live=False), **options)


def _eval_samples(*scores):
    return [Sample(f"{uid}+1=", str(uid), str(uid + 1), score, uid, "eval") for uid, score in enumerate(scores)]


def _lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Failing(Tracker):
    """A tracker whose every call raises."""

    def __init__(self, error):
        self.error = error
        self.calls = 0

    def log(self, step, metrics):
        self.calls += 1
        raise self.error

    log_samples = log

    def close(self):
        raise self.error


def test_jsonl_writes_one_object_per_step_and_sample_and_warns_once_per_name_that_is_not_finite(tmp_path, caplog):
    tracker = JsonlTracker(_run(tmp_path))
    for step, loss in enumerate((0.5, float("nan"), float("nan"))):
        tracker.log(step, {"actor/pg_loss": loss, "actor/lr": 0.1})
    tracker.log_samples(1, [Sample("1+1=", "2", "2", 1.0, 7)])
    assert _lines(tmp_path / "metrics.jsonl") == [
        {"step": step, "actor/pg_loss": loss, "actor/lr": 0.1} for step, loss in enumerate((0.5, None, None))
    ]
    assert _lines(tmp_path / "samples.jsonl") == [
        {"step": 1, "split": "train", "prompt": "1+1=", "response": "2", "answer": "2", "score": 1.0, "uid": 7}
    ]
    assert caplog.messages == ["step=1 not_finite: actor/pg_loss=nan; written as null in metrics.jsonl."]
    tracker.close()


def test_tensorboard_keeps_names_and_values(tmp_path):
    tracker, directory = TensorBoardTracker(_run(tmp_path)), str(tmp_path / "tensorboard")
    tracker.log(1, {"critic/score/mean": 0.25, "val-core/a/acc/mean@1": 0.5})
    assert EventAccumulator(directory).Reload().Scalars("critic/score/mean")  # on disk after each step
    tracker.log_samples(1, [Sample("a|b", "c\nd", None, 1.0, 0)])
    tracker.close()
    events = EventAccumulator(directory).Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/score/mean")] == [(1, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("val-core/a/acc/mean@1")] == [(1, 0.5)]
    text = events.Tensors("samples/train")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[-1] == "| a\\|b | c↵d |  | 1 |"


def _jsonl_values(path):
    return [(row["step"], row["x"]) for row in _lines(path / "metrics.jsonl")]


def _tensorboard_values(path):
    return [(event.step, event.value) for event in EventAccumulator(str(path / "tensorboard")).Reload().Scalars("x")]


@pytest.mark.parametrize(("make", "values"), [(JsonlTracker, _jsonl_values), (TensorBoardTracker, _tensorboard_values)])
def test_a_rewound_tracker_drops_later_steps(tmp_path, make, values, monkeypatch):
    monkeypatch.setattr(event_file_writer, "_global_uid", AtomicCounter(0))  # file names are ordered as text: 9 > 10
    first = make(_run(tmp_path))
    for step in range(1, 8):
        first.log(step, {"x": 0.0})
        first.log_samples(step, _eval_samples(1.0))
    first.close()
    resumed = make(_run(tmp_path, resume_after=5))
    assert len(values(tmp_path)) == 7
    resumed.rewind(5, is_unlogged=False)
    resumed.log(6, {"x": 1.0})
    resumed.close()
    assert values(tmp_path) == [(step, 0.0) for step in range(1, 6)] + [(6, 1.0)]
    if make is JsonlTracker:
        assert [row["step"] for row in _lines(tmp_path / "samples.jsonl")] == list(range(1, 6))
        JsonlTracker(_run(tmp_path)).log(1, {"x": 2.0})  # a new run sets the files of the old one aside
        assert _jsonl_values(tmp_path) == [(1, 2.0)] and len(_lines(tmp_path / "metrics.1.jsonl")) == 6


def _resumed_messages(tmp_path, caplog, *, after):
    caplog.clear()
    resumed = JsonlTracker(_run(tmp_path, resume_after=after))
    with caplog.at_level(logging.WARNING):
        resumed.rewind(after, is_unlogged=False)
        resumed.log(after + 1, {"x": 1.0})
        resumed.rewind(after, is_unlogged=False)  # after a fault: it is not said again
    resumed.close()
    return caplog.messages


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 1, 2, 3, 4, 5], ""),
        ([1, 2, 3, 4], ""),  # without an evaluation before the first step
        ([3, 4], ""),  # a run that began from a checkpoint of another
        ([0, 1, 2, 4], "has no row of step 3: "),
        ([0, 4], "has no row of 3 steps (1 to 3): "),
        ([], "has no row of 4 steps (1 to 4): "),
        ([0, 1, 2, 2, 3, 4], "repeats step 2: "),
        ([0, 1, 1, "2", 3], "has no row of 2 steps (2 to 4) and repeats step 1: "),
        ([0, 1, 2, 3, True, -4, 1 << 60], "has no row of step 4: "),
    ],
)
def test_a_resume_says_once_which_steps_before_it_lack_a_row_or_have_several(tmp_path, caplog, steps, said):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps({'step': step})}\n" for step in steps))
    messages = _resumed_messages(tmp_path, caplog, after=4)
    assert len(messages) == bool(said) and all(f"file={path} {said}" in each for each in messages)


def test_a_resume_without_a_metrics_file_says_so_unless_its_directory_is_new(tmp_path, caplog):
    assert not _resumed_messages(tmp_path / "new", caplog, after=4)
    (tmp_path / "new" / "metrics.jsonl").unlink()
    [said] = _resumed_messages(tmp_path / "new", caplog, after=4)
    assert "has no row of 4 steps (1 to 4)" in said


@pytest.mark.parametrize(("name", "said"), [("metrics.jsonl", "is a directory"), ("tensorboard", "FileExistsError")])
def test_what_is_in_place_of_a_trackers_files_is_named(tmp_path, name, said):
    (tmp_path / name).mkdir() if name == "metrics.jsonl" else (tmp_path / name).touch()
    with pytest.raises(ResourceError, match=said) as caught:
        make_trackers(["jsonl", "tensorboard"], _run(tmp_path))
    assert name in caught.value.message and "or use another trainer.run_dir" in caught.value.remedy


def test_a_fifo_in_place_of_a_file_is_an_error_and_not_a_wait(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ResourceError, match="is a FIFO or a socket"):
        JsonlTracker(_run(tmp_path, resume_after=4))
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []


def test_the_console_shows_evaluation_prompts_before_and_now(tmp_path):
    tracker = ConsoleTracker(run := _run(tmp_path))
    tracker.log(0, {"val-core/a/acc/mean@1": 0.0})
    tracker.log_samples(0, _eval_samples(0.0, 0.0, 1.0))
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.log_samples(1, [*_eval_samples(1.0, 0.0, 1.0), Sample("9+9=", "18", "18", 1.0, 3)])
    tracker.close()
    text = run.progress.console.file.getvalue()
    right = "correct: a score of 0.5 or more"
    assert f"eval samples  step 1  3 prompts: 1 became correct, 0 became wrong since step 0\n{right}\n" in text
    assert f"\nsamples  step 1\n{right}\n" in text
    assert "step  1/10" in text
    assert "step  0/10" not in text


def test_a_resumed_console_compares_with_the_first_evaluation_of_the_earlier_process(tmp_path):
    with closing(make_trackers(["jsonl", "console"], _run(tmp_path))) as trackers:
        trackers.log(0, {"val-core/a/acc/mean@1": 0.25})
        trackers.log_samples(0, _eval_samples(0.0, 0.0))
        trackers.log(5, {"val-core/a/acc/mean@1": 0.5})
        trackers.log_samples(5, _eval_samples(1.0, 0.0))
    with closing(make_trackers(["jsonl", "console"], run := _run(tmp_path, resume_after=5))) as trackers:
        trackers.log(6, {"val-core/a/acc/mean@1": 0.75})
        trackers.log_samples(6, _eval_samples(1.0, 1.0))
    text = run.progress.console.file.getvalue()
    assert "exact match 0.750 (was 0.250)" in text
    assert "2 became correct, 0 became wrong since step 0\n" in text


def test_a_console_resumed_in_another_directory_says_that_the_first_evaluation_is_missing(tmp_path, caplog):
    run = _run(tmp_path, resume_after=5)
    with caplog.at_level(logging.INFO), closing(make_trackers(["jsonl", "console"], run)) as trackers:
        trackers.log_samples(6, _eval_samples(0.0, 1.0))
        trackers.log_samples(7, _eval_samples(1.0, 1.0))
    text = run.progress.console.file.getvalue()
    assert "1 became correct, 0 became wrong since step 6\n" in text
    assert "lacks the samples of earlier evaluations: later ones are compared with step 6" in caplog.text


@pytest.mark.parametrize("error", [ConnectionError("no route"), OSError(errno.EIO, "input/output error")])
def test_a_failing_tracker_is_dropped_and_named_while_the_others_go_on(tmp_path, caplog, error):
    failing, kept = Failing(error), JsonlTracker(_run(tmp_path))
    with caplog.at_level(logging.WARNING), closing(FanoutTracker({"wandb": failing, "jsonl": kept})) as trackers:
        trackers.log(4, {"x": 1.0})
        trackers.log(5, {"x": 1.0})
        assert trackers.names == ["jsonl"]
    assert failing.calls == 1
    assert [row["step"] for row in _lines(tmp_path / "metrics.jsonl")] == [4, 5]
    assert caplog.messages == [f"tracker=wandb failed step=4 and is dropped: {type(error).__name__}: {error}"]
    with pytest.raises(ValueError, match="the real one"), closing(FanoutTracker({"mlflow": failing})):
        raise ValueError("the real one")


def test_a_full_disk_rises_after_every_other_tracker_was_served(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "metrics.jsonl").symlink_to("/dev/full")
    trackers = FanoutTracker({name: JsonlTracker(_run(tmp_path / name)) for name in ("full", "other")})
    with pytest.raises(ResourceError, match=r"disk is full.*metrics\.jsonl.*trainer\.run_dir"):
        trackers.log(1, {"x": 1.0})
    assert _lines(tmp_path / "other" / "metrics.jsonl") == [{"step": 1, "x": 1.0}]
    trackers.close()


def test_the_factory_makes_each_named_tracker_once(tmp_path):
    with closing(make_trackers(["tensorboard", "jsonl", "jsonl"], _run(tmp_path))) as trackers:
        assert trackers.names == ["jsonl", "tensorboard"]
        trackers.log(1, {"x": 1.0})
    assert list((tmp_path / "tensorboard").iterdir())


def test_an_unknown_tracker_names_the_nearest_and_the_choices():
    (error,) = unknown_trackers(["jsonl", "tensorbord"])
    assert "trainer.trackers names 'tensorbord'" in error.message
    assert error.remedy == "Did you mean 'tensorboard'? Choose from: jsonl, console, tensorboard, wandb, mlflow."


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_tracking_package_names_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=name) as caught:
        make_trackers([name], _run(tmp_path))
    assert f".[{name}]" in caught.value.remedy
