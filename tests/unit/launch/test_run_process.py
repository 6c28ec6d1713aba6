"""The process of a submitted run: it starts where the command was typed, and ends with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.config import storage_token
from hybridflow.config.storage_token import written_token
from hybridflow.errors import ResourceError
from hybridflow.launch.run_process import RunCommand, RunProcess

PARENT = """
import os, sys, time
from pathlib import Path
from hybridflow.config.storage_token import written_token
from hybridflow.launch.run_process import RunCommand, RunProcess

folder = Path(sys.argv[1])
with written_token(folder) as meeting:
    process = RunProcess(RunCommand(("ppo",), folder, folder / "said.log", *meeting))
    process.start({}, 1)
    print(process._process.pid, flush=True)
    time.sleep(100)
"""


def ended(process: RunProcess) -> int:
    deadline = time.monotonic() + 60
    while (status := process.status()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return status


def environment_of(process: RunProcess) -> dict[str, str]:
    assert process._process is not None
    file = Path(f"/proc/{process._process.pid}/environ")
    while not (lines := file.read_text().split("\0"))[0]:  # while it becomes the command
        time.sleep(0.01)
    return dict(line.split("=", 1) for line in lines if line)


def test_a_run_has_its_words_its_directory_its_output_and_its_share_of_the_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")  # Ray sets one for each of its processes
    (tmp_path / "mine.yaml").write_text("command: ppo\ntrainer.seed: 17\n")
    with written_token(tmp_path) as meeting:
        command = RunCommand(("run", "mine.yaml", "--cfg", "job"), tmp_path, tmp_path / "said.log", *meeting)
        process = RunProcess(command)
        assert process.status() is None
        process.start({"OURS": "1"}, devices_of_node=1)
        assert environment_of(process).items() >= {"OURS": "1", "OMP_NUM_THREADS": str(os.cpu_count())}.items()
        assert ended(process) == 0
        assert "seed: 17" in (tmp_path / "said.log").read_text()
        process.start({"OMP_NUM_THREADS": "3"}, devices_of_node=1)
        assert environment_of(process)["OMP_NUM_THREADS"] == "3"
        process.stop()
        assert ended(process) in (-signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("wrong", "said", "remedy"),
    [
        (
            {"token": "other"},
            "does not see trainer.run_dir={folder} as this command does: .* other content",
            "trainer.run_dir",
        ),
        (
            {"meeting": Path("/nowhere/.meeting")},
            "does not see trainer.run_dir=/nowhere .* No such file",
            "trainer.run_dir",
        ),
        (
            {"working_directory": Path("/nowhere")},
            "does not have the working directory of this command",
            "Start the sweep",
        ),
    ],
)
def test_a_node_that_does_not_see_the_directories_of_the_command_is_named(tmp_path, monkeypatch, wrong, said, remedy):
    monkeypatch.setattr(storage_token, "PATIENCE_SECONDS", 0.1)
    with written_token(tmp_path) as (meeting, token):
        right = {"working_directory": tmp_path, "meeting": meeting, "token": token}
        command = RunCommand(("--version",), output=tmp_path / "said.log", **(right | wrong))
        with pytest.raises(ResourceError, match=said.format(folder=tmp_path)) as error:
            RunProcess(command).start({}, 1)
    assert remedy in error.value.remedy and "on storage that all nodes mount under the same path" in error.value.remedy


def test_a_run_ends_with_the_process_that_started_it(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while b"hybridflow\0ppo" not in Path(f"/proc/{child}/cmdline").read_bytes():  # the command itself
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    assert not (tmp_path / "runs").exists()
