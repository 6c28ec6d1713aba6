"""Whole runs of a few steps on a toy model, from the command's words to the run directory."""

import json
import os
import re
import signal
import socket
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from hybridflow import __version__
from hybridflow.elastic.checkpoint import Checkpoint, CheckpointStore
from hybridflow.elastic.claim import is_claimed
from hybridflow.elastic.resuming import resolve_resume
from hybridflow.errors import CheckpointError, ConfigError, WorkerError
from hybridflow.launch import run_directory
from hybridflow.launch.compose.compose import compose_run
from hybridflow.launch.execute import execute
from hybridflow.launch.messages import Finished
from hybridflow.launch.prepare import Prepared, prepare
from hybridflow.launch.reporting import Reporting
from hybridflow.observability.ending import Ending
from hybridflow.trainer import main_ppo
from tests.toys import MakeToy

NOT_REPRODUCIBLE = ("timing_s/", "perf/")


class Words:
    """What a user types for a small run on a toy model and a few sums."""

    def __init__(self, toy_dir: MakeToy, folder: Path) -> None:
        self.folder = folder
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
        (folder / "judge.py").write_text(
            "import pathlib\n"
            f"trap = pathlib.Path({str(folder / 'trap')!r})\n"
            "def short(prompts, completion_ids, **columns):\n"
            "    if trap.exists() and len(prompts) > 3:\n"
            "        left = int(trap.read_text())\n"
            "        trap.write_text(str(left - 1))\n"
            "        assert left > 1, 'the trap'\n"
            "    return [-float(len(ids)) for ids in completion_ids]\n"
        )
        self.common = [
            f"model.path={toy_dir()}",
            f"data.train_files={folder}/sums.jsonl",
            f"data.eval_files={folder}/eval.jsonl",
            "data={batch_size: 4, max_prompt_tokens: 8, max_response_tokens: 6}",
            "rollout.samples_per_prompt=2",
            f"reward.functions={folder}/judge.py:short",
            "trainer={total_steps: 4, eval_every: 2, save_every: 2, samples_every: 2, keep_checkpoints: 9, threads: 1}",
            "trainer={backend: local, device: cpu, trackers: [jsonl]}",
            "actor.optimizer={learning_rate: 0.01, epsilon: 1e-3}",
        ]

    def run(self, name: str, *overrides: str, dataflow: str = "algorithm=grpo") -> Finished:
        """One run in a directory of its own."""
        return execute(self.prepared(name, *overrides, dataflow=dataflow), Console(quiet=True))

    def prepared(self, name: str, *overrides: str, dataflow: str = "algorithm=grpo") -> Prepared:
        """A run in a directory of its own that may start."""
        words = [*self.common, dataflow, f"trainer.run_dir={self.folder / name}", *overrides]
        return prepare(compose_run(words, config_name="ppo"))

    def fail_after(self, steps: int) -> None:
        """The reward function will raise in the step after so many."""
        (self.folder / "trap").write_text(str(steps + 1))

    def repair(self) -> None:
        """The reward function works again."""
        (self.folder / "trap").unlink()


@pytest.fixture
def words(toy_dir, tmp_path) -> Words:
    return Words(toy_dir, tmp_path)


def rows(finished: Finished | Path) -> dict[int, dict[str, float]]:
    directory = finished.run_dir if isinstance(finished, Finished) else finished
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines)
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(NOT_REPRODUCIBLE)} for line in lines}


def test_a_run_leaves_everything_in_its_directory_and_another_seed_gives_other_numbers(words):
    finished = words.run("whole", dataflow="algorithm=ppo")
    found = {path.name for path in finished.run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "checkpoints", "report.html"} <= found
    assert list(rows(finished)) == [0, 1, 2, 3, 4]
    assert finished.outcome.steps == 4
    assert finished.outcome.checkpoint == finished.run_dir / "checkpoints" / "step_4"
    text = (finished.run_dir / "config.yaml").read_text()
    assert "# origin: command line" in text
    assert "  old_logprobs: auto  # origin: default; resolved to: no separate forward pass; the update uses" in text
    assert rows(words.run("second", "trainer.seed=1", dataflow="algorithm=ppo")) != rows(finished)


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm=grpo"],
        ["algorithm=ppo", "algorithm.kl={placement: reward, coefficient: 0.1, target: 0.05, horizon: 1000}"],
    ],
    ids=["grpo", "ppo with an adaptive coefficient"],
)
def test_a_run_that_failed_goes_on_with_the_same_numbers_to_the_last_bit(words, algorithm):
    dataflow, *more = algorithm
    more = [*more, "actor.optimizer.schedule=linear"]
    whole = words.run("whole", *more, dataflow=dataflow)
    words.fail_after(steps=3)
    with pytest.raises(WorkerError, match=r"judge\.py|short"):
        words.run("broken", *more, dataflow=dataflow)
    assert list(rows(words.folder / "broken")) == [0, 1, 2, 3]
    words.repair()
    again = words.run("broken", *more, dataflow=dataflow)
    assert rows(again) == rows(whole)
    assert again.outcome.evaluation == whole.outcome.evaluation
    assert again.first_evaluation == whole.first_evaluation
    saved = sorted(
        path.relative_to(whole.outcome.checkpoint) for path in whole.outcome.checkpoint.glob("**/*.safetensors")
    )
    assert Path("actor/huggingface/model.safetensors") in saved
    for name in [*saved, Path("actor/worker.json")]:
        assert (again.outcome.checkpoint / name).read_bytes() == (whole.outcome.checkpoint / name).read_bytes()


def test_a_finished_run_started_again_only_reports_and_says_if_no_ending_was_recorded(words, caplog):
    first = words.run("whole")
    before = rows(first)
    assert "raise it to continue" not in caplog.text
    caplog.clear()
    again = words.run("whole")
    assert "all roles have started" not in caplog.text
    assert (
        "the run is complete" in caplog.text
        and "step_4 has all of trainer.total_steps=4: raise it to continue" in caplog.text
    )
    assert rows(again) == before
    assert again.outcome.checkpoint == first.outcome.checkpoint
    assert again.outcome.evaluation == first.outcome.evaluation
    assert "no ending was recorded" not in caplog.text
    (first.run_dir / "ending.json").unlink()
    words.run("whole")
    found = f"run_dir={first.run_dir}: the earlier run here failed: no ending was recorded: the run's process"
    assert found in caplog.text


def test_other_settings_are_refused_before_anything_is_changed_and_starting_anew_sets_the_run_aside(words, caplog):
    before = (words.run("whole").run_dir / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"data\.batch_size"):
        words.run("whole", "data.batch_size=2")
    assert "raise it to continue" not in caplog.text
    assert (words.folder / "whole" / "config.yaml").read_text() == before
    words.run("whole", "trainer.resume=never", "trainer.total_steps=1")
    assert list(rows(words.folder / "whole")) == [0, 1]
    assert list(rows(words.folder / "whole.1")) == [0, 1, 2, 3, 4]


def test_a_failure_in_a_worker_is_status_1_with_its_place_in_the_log_and_a_report(words, capsys):
    words.fail_after(steps=3)
    directory = words.folder / "broken"
    assert main_ppo.main([*words.common, "algorithm=grpo", f"trainer.run_dir={directory}"]) == 1
    shown = capsys.readouterr().err
    assert "RewardError: In training step 4: The reward function" in " ".join(shown.split())
    for part in ("the trap", "role=reward rank=0", "method=score", f"report      {directory}/report.html"):
        assert part in shown
    assert "all roles have started; 0 of " in shown
    assert f"checkpoint  {directory}/checkpoints/step_3  (the same command resumes from it; " in shown
    assert "trainer.resume_changed=accept" in shown
    page, last = (directory / "report.html").read_text(), (directory / "run.log").read_text().splitlines()[-1]
    assert "<strong>failed</strong>" in page and "the trap" in page
    assert " ERROR " in last and "the trap" in last and "What to do: " in last
    words.repair()
    words.run("broken")
    assert 'class="ending' not in (directory / "report.html").read_text()
    assert (directory / "run.log").read_text().splitlines()[-1].endswith("done: 4 steps")


SPY = """
import pathlib
run, seen = pathlib.Path({run!r}), pathlib.Path({seen!r})

def spy(completions, **columns):
    if (run / "report.html").exists():
        seen.write_text((run / "report.html").read_text())
    return [-float(len(text)) for text in completions]
"""


def test_the_report_exists_from_the_first_step_and_the_log_tells_the_story(words, monkeypatch):
    run, seen = words.folder / "told", words.folder / "seen.html"
    (words.folder / "spy.py").write_text(SPY.format(run=str(run), seen=str(seen)))
    settings = ["trainer.total_steps=2", f"reward.functions={words.folder}/spy.py:spy", "reward.processes=0"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "x", "reward.settings.f.api_key=hunter2-hunter2", "a b"])
    words.run("told", *settings)
    assert "1 step, which took " in seen.read_text() and 'data-refresh="5"' in seen.read_text()
    assert "data-refresh" not in (run / "report.html").read_text()
    lines = [line.partition(" INFO    ")[2].partition(" ")[2] for line in (run / "run.log").read_text().splitlines()]
    assert re.match(rf"started hybridflow={__version__} python=3\.\d+\.\d+ torch=2.* transformers=5.* ray=2", lines[0])
    assert lines[1] == "command=python -m x reward.settings.f.api_key=*** 'a b'"
    assert re.match(rf"host={socket.gethostname()} pid={os.getpid()} cpus=\d+ memory_gb=\d+ gpus=", lines[2])
    assert re.search(rf"directory={Path.cwd()} commit=(none|[0-9a-f]{{12}}(-dirty)?)$", lines[2])
    told = [line.partition(" seconds=")[0] for line in lines if line.startswith(("evaluation", "saved", "done"))]
    saved = f"saved checkpoint={run}/checkpoints/step_2"
    assert told == ["evaluation step=0", "evaluation step=2", saved, "done: 2 steps"]


def test_a_data_file_without_rows_is_status_2_and_touches_nothing(words, capsys):
    (words.folder / "sums.jsonl").write_text("")
    argv = [*words.common, "algorithm=grpo", f"trainer.run_dir={words.folder / 'none'}"]
    assert main_ppo.main(argv) == 2
    assert "What to do:" in capsys.readouterr().err
    assert not (words.folder / "none").exists()


def test_a_report_that_cannot_be_made_does_not_hide_how_the_run_ended(words, caplog):
    prepared = words.prepared("gone")
    directory = prepared.directory
    assert Reporting(prepared).end(Ending("done", "25 steps")) is None
    (directory / "run.log").unlink()
    Reporting(prepared).end(Ending("done", "25 steps"))
    assert f"file={directory}/metrics.jsonl no longer exists, so report.html is not written" in caplog.text
    assert caplog.text.count(f"file={directory}/run.log no longer exists") == 1
    (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    (directory / "config.yaml").write_bytes(b"\xff\xfe")
    assert Reporting(prepared).end(Ending("failed", "the run's own error")) is None
    assert "report.html could not be written: " in caplog.text


def test_the_directory_is_claimed_before_a_checkpoint_is_read(words, monkeypatch):
    """So the same command twice is refused, also while the first still verifies its checkpoint."""
    claimed = []

    def watched(resume: str, store: CheckpointStore, *others, **named) -> Checkpoint | None:
        claimed.append(is_claimed(store.run_dir))
        return resolve_resume(resume, store, *others, **named)

    monkeypatch.setattr(run_directory, "resolve_resume", watched)
    words.prepared("run")
    assert claimed == [True]


def test_the_learning_rate_goes_on_as_it_began_whatever_the_total_steps_are(words):
    linear = ["actor.optimizer.schedule=linear", "trainer.save_every=1"]
    whole = rows(words.run("whole", *linear))
    assert whole[4]["actor/lr"] == pytest.approx(0.01 / 4)
    words.fail_after(2)
    with pytest.raises(WorkerError):
        words.run("resumed", *linear)
    words.repair()
    assert rows(words.run("resumed", *linear, "trainer.total_steps=3"))[3]["actor/lr"] == whole[3]["actor/lr"]
    with pytest.raises(ConfigError, match=r"total_steps=6 goes beyond actor\.optimizer\.schedule_steps=4") as caught:
        words.run("resumed", *linear, "trainer.total_steps=6")
    assert "schedule_steps=6: the rate is then 0.00333 at step 5 and falls to 0 after step 6" in caught.value.remedy
    longer = rows(words.run("resumed", *linear, "trainer.total_steps=6", "actor.optimizer.schedule_steps=6"))
    assert longer[5]["actor/lr"] == pytest.approx(0.01 * 2 / 6)


class _InterruptedAtTheEnd(StringIO):
    """A terminal at which Ctrl-C is pressed as soon as it shows that the run is done."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if "done  " in text and self.getvalue().count("done  ") == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return written


def test_ctrl_c_while_the_last_lines_are_written_is_not_called_before_the_run(words, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := _InterruptedAtTheEnd())
    argv = [*words.common, "algorithm=grpo", "trainer.total_steps=1", f"trainer.run_dir={words.folder / 'last'}"]
    assert main_ppo.main(argv) == 130
    assert terminal.getvalue().startswith("starting  grpo  ")
    assert terminal.getvalue().partition("\n")[0].endswith("  1 step")
    assert "interrupted  after the run had ended; all of its files are written" in terminal.getvalue()
    assert (words.folder / "last" / "checkpoints" / "step_1" / "manifest.json").is_file()


def test_a_run_that_no_process_can_watch_says_so_and_goes_on(words, monkeypatch, caplog):
    prepared = words.prepared("unwatched")
    monkeypatch.setattr(sys, "executable", str(words.folder / "no_python"))
    Reporting(prepared).begin()
    assert "no process watches this run ([Errno 2] No such file" in caplog.text
    assert "if it is killed, its ending is not recorded" in caplog.text
