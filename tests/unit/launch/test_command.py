"""Exit statuses of `python -m hybridflow.trainer.main_*`, and signals while it or `hybridflow` still imports."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.launch import prepare as prepare_module
from hybridflow.launch.compose.compose import Composed
from hybridflow.launch.prepare import Prepared, prepare
from hybridflow.observability.ending import read_ending
from hybridflow.trainer import main_ppo
from tests.unit.launch.test_execute import Words


@pytest.mark.parametrize(
    ("command", "number", "status", "imported"),
    [
        ("hybridflow.trainer.main_ppo", "SIGINT", 130, "omegaconf._utils"),
        ("hybridflow.trainer.main_ppo", "SIGTERM", 143, "torch.types"),
        ("hybridflow grpo", "SIGINT", 130, "torch.types"),
        ("hybridflow show", "SIGINT", 130, "rich.console"),
        ("hybridflow show", "SIGUSR1", 75, "omegaconf._utils"),
        ("hybridflow export nowhere", "SIGINT", 130, "torch.types"),
    ],
)
def test_a_signal_while_libraries_are_imported_is_one_line(command, number, status, imported, tmp_path):
    """Before the settings are read, and after: torch comes once they are checked."""
    is_run = "main_ppo" in command or "grpo" in command
    words = ["-m", *command.split(), f"trainer.run_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-X", "importtime", *words]
    before = signal.signal(getattr(signal, number), signal.SIG_DFL)  # the tests' own start may ignore it
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(getattr(signal, number), before)
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if imported in line:
            process.send_signal(getattr(signal, number))
            break
    said += process.stderr.readlines()
    assert process.wait() == status
    told = [line for line in said if not line.startswith(("import time:", "starting  ")) and line != "\n"]
    assert told == ["interrupted  before the run began\n" if is_run else "interrupted\n"]
    assert not (tmp_path / "run").exists()


def test_a_run_whose_roles_cannot_start_is_status_2(toy_dir, tmp_path, monkeypatch):
    argv = [*Words(toy_dir, tmp_path).common, "algorithm=grpo", f"trainer.run_dir={tmp_path / 'run'}"]
    [weights] = Path(toy_dir()).glob("*.safetensors")
    whole = weights.read_bytes()

    def then_damaged(composed: Composed) -> Prepared:
        prepared = prepare(composed)
        weights.write_bytes(whole[:-1000])
        return prepared

    monkeypatch.setattr(prepare_module, "prepare", then_damaged)
    try:
        assert main_ppo.main(argv) == 2
    finally:
        weights.write_bytes(whole)


STUBBORN = """
import pathlib
import time

def never(prompts, completions, **columns):
    pathlib.Path(__file__).with_name("scoring").touch()
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass
"""


def test_a_third_signal_leaves_an_ending_that_says_interrupted(toy_dir, tmp_path):
    words = Words(toy_dir, tmp_path)
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    argv = [*words.common, "algorithm=grpo", f"trainer.run_dir={tmp_path / 'run'}"]
    argv += [f"reward.functions={tmp_path}/stubborn.py:never", "reward.processes=0"]
    with subprocess.Popen([sys.executable, "-m", "hybridflow.trainer.main_ppo", *argv]) as process:
        for _ in range(600):
            if (tmp_path / "scoring").exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(1.5)  # signals within a second are one request
        try:
            assert process.wait(60) == 130
        finally:
            process.kill()
    time.sleep(1.0)  # in which the witness would write another ending
    ending = read_ending(tmp_path / "run")
    assert ending is not None and ending.how == "interrupted"
