"""`--multirun`: all runs are checked first, then executed one after another, and those that are done only once."""

import csv
import os
import signal
import subprocess
import sys
import time

import pytest

from hybridflow.errors import Problems
from hybridflow.launch import multirun
from hybridflow.launch.compose.command_line import parse_command_line
from hybridflow.launch.compose.trainers import known_command
from hybridflow.trainer import main_ppo

EVALUATION = ["dataflow=evaluate", "trainer.total_steps=0", "data.eval_limit=4", "trainer.threads=1"]
"""The quickest run: it starts, evaluates 4 prompts, and ends."""


def results(folder):
    with (folder / "results.csv").open() as lines:
        return list(csv.DictReader(lines))


def test_problems_of_all_runs_are_found_before_the_first_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["-m", "algorithm=grpo,rloo,nope", "actor.optimizer.learning_rate=1e-5,7"]
    for flags in (["--dry-run"], []):
        assert main_ppo.main([*flags, *words]) == 2
        said = capsys.readouterr().err
        assert "1. ConfigError: actor.optimizer.learning_rate=7 is out of range." in said
        assert "In 3 of 6 runs: those with actor.optimizer.learning_rate=7" in said
        assert "2. ConfigError: There is no algorithm=nope." in said
        assert "In 2 of 6 runs: those with algorithm=nope" in said and "2 problems; nothing was started" in said
    assert not (tmp_path / "runs").exists()


def test_problems_of_data_are_found_too_and_a_sweep_without_problems_is_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = "data.eval_files=[builtin:calculator/eval],[none.jsonl]"
    assert main_ppo.main(["-m", "--dry-run", *EVALUATION, files]) == 2
    said = capsys.readouterr().err
    assert "data: No such file or directory: 'none.jsonl'" in said and "1 problem; nothing" in said
    assert main_ppo.main(["-m", "--dry-run", *EVALUATION, "trainer.seed=1,2", "trainer.experiment=mine"]) == 0
    said = capsys.readouterr().err
    assert "  seed=1  runs/mine-sweep/seed=1\n  seed=2  runs/mine-sweep/seed=2" in said
    assert "2 runs, no errors found; nothing was started" in said
    assert main_ppo.main(["-m", "--dry-run", *EVALUATION, "trainer.seed=range(1)"]) == 0
    assert "1 run, no errors found; nothing was started" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.run_dir=a,b"], "trainer.run_dir has several values."),
        (["trainer.seed=1,2", "trainer.run_dir=held"], "holds a single run."),
    ],
)
def test_a_sweep_without_a_place_of_its_own_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.yaml").touch()
    assert main_ppo.main(["-m", *EVALUATION, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--jobs", "ray", "trainer.seed=1"], "--jobs=ray is for sweeps. Add --multirun, or leave --jobs out."),
        (["-m", "--jobs", "slurm", "trainer.seed=1,2"], "--jobs: invalid choice: 'slurm' (choose from"),
    ],
)
def test_a_place_for_runs_is_one_that_exists_and_needs_a_sweep(capsys, words, said):
    assert main_ppo.main(words) == 2
    assert said in capsys.readouterr().err.replace("\nWhat to do:", "")


def test_a_failed_run_does_not_stop_the_others_and_is_the_only_one_to_be_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(
        "import pathlib\n"
        "def judge(completions, **columns):\n"
        "    assert pathlib.Path('mended').exists(), 'not yet'\n"
        "    return [0.5 for _ in completions]\n"
    )
    words = ["-m", *EVALUATION, "reward.functions=[judge.py:judge],[exact_match]", "trainer.run_dir=sweep"]
    assert main_ppo.main(words) == 1
    failed, done = results(tmp_path / "sweep")
    assert (failed["status"], done["status"]) == ("failed", "done")
    assert failed["functions"] == "[judge.py:judge]" and float(done["val-core/calculator/acc/mean@1"]) >= 0
    assert (tmp_path / done["directory"] / "samples.jsonl").is_file() and float(done["seconds"]) > 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["functions", "status"] and "calculator exact match" in header
    assert "failed" in first and second.split()[1] == "done"

    (tmp_path / "mended").touch()
    assert main_ppo.main(words) == 0
    assert "run 2 of 2  functions=exact_match" in (said := capsys.readouterr().err) and "is done" in said
    again, kept = results(tmp_path / "sweep")
    assert kept == done | {name: "" for name in again if name not in done}
    assert again["status"] == "done" and float(again["val-core/calculator/reward/mean@1"]) == 0.5


@pytest.mark.slow
def test_a_signal_stops_the_run_and_the_sweep_and_the_table_says_what_is_left(tmp_path):
    words = ["algorithm=grpo", "trainer.seed=1,2", "trainer.total_steps=500", "trainer.run_dir=sweep"]
    command = [sys.executable, "-m", "hybridflow", "ppo", "-m", *words]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, process_group=0, env=os.environ,
    )  # fmt: skip
    record = tmp_path / "sweep" / "seed=1" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (record.is_file() and len(record.read_text().splitlines()) > 1):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    _, first, second = said.splitlines()
    assert "interrupted" in first and "not started" in second
    assert [row["status"] for row in results(tmp_path / "sweep")] == ["interrupted", "not started"]
    assert list((tmp_path / "sweep" / "seed=1" / "checkpoints").glob("step_*"))


def test_each_run_of_a_sweep_has_a_place_of_its_own_below_the_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*EVALUATION, "trainer.seed=1,2", f"trainer.checkpoint_url=file://{tmp_path}/kept/"]
    flags = parse_command_line(["-m", *words], program="hybridflow ppo", command=known_command("ppo"))
    runs = multirun._planned(flags, Problems(collects=True))
    urls = [[word for word in run.words if "checkpoint_url" in word] for run in runs]
    assert urls == [[f"trainer.checkpoint_url='file://{tmp_path}/kept/seed={seed}'"] for seed in (1, 2)]
