"""The room that a run needs is that of all checkpoints that lie on the disk at once."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.config.loop import Trainer
from hybridflow.errors import ResourceError
from hybridflow.launch.rules.resources import run_directory_problems
from hybridflow.models.geometry import parameter_count, read_geometry
from tests.unit.launch.plans import judged, planned


def room(toy: Path, directory: Path, *settings: str) -> None:
    words = ["algorithm=grpo", "task=calculator", "rollout.samples_per_prompt=2", f"model.path={toy}", *settings]
    judged(planned(*words, f"trainer.run_dir={directory}"), run_directory_problems)


@pytest.fixture
def parameters(toy_dir) -> int:
    return parameter_count(read_geometry(toy_dir()))


@pytest.fixture
def free_checkpoints(parameters, monkeypatch):
    """A function: the disk has room for as many checkpoints in float32, and for logs."""

    def set_free(count: float, *, bytes_per_parameter: int = 12) -> None:
        free = int(count * bytes_per_parameter * parameters) + (1 << 20)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))

    return set_free


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ("trainer={total_steps: 9, save_every: 1}", Trainer().keep_checkpoints + 1),
        ("trainer={total_steps: 9, save_every: 1, keep_checkpoints: 4}", 5),
        ("trainer={total_steps: 9, save_every: 5, keep_checkpoints: 4}", 2),
        ("trainer={total_steps: 9, save_every: 50}", 1),
    ],
)
def test_the_checkpoints_kept_and_the_one_being_written_need_room(
    toy_dir, tmp_path, free_checkpoints, settings, needed
):
    free_checkpoints(needed)
    room(toy_dir(), tmp_path, settings)
    free_checkpoints(needed - 0.1)
    with pytest.raises(ResourceError, match=f"the run writes {needed} checkpoint") as caught:
        room(toy_dir(), tmp_path, settings)
    assert "lower trainer.keep_checkpoints" in caught.value.remedy


def test_a_setting_that_is_already_at_its_least_is_no_remedy(toy_dir, tmp_path, free_checkpoints):
    free_checkpoints(1)
    with pytest.raises(ResourceError) as caught:
        room(toy_dir(), tmp_path, "trainer={total_steps: 9, save_every: 1, keep_checkpoints: 1}")
    assert "keep_checkpoints" not in caught.value.remedy and "larger disk;" in caught.value.remedy


def test_checkpoints_of_the_run_that_lie_there_already_need_no_more_room(toy_dir, tmp_path, free_checkpoints):
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    free_checkpoints(1)
    room(toy_dir(), tmp_path, "trainer={total_steps: 9, save_every: 1}")
    with pytest.raises(ResourceError, match="writes 3 checkpoints"):
        room(toy_dir(), tmp_path, "trainer={total_steps: 9, save_every: 1, resume: never}")


def test_weights_in_bfloat16_are_saved_beside_their_float32_copies(toy_dir, tmp_path, free_checkpoints):
    settings = ["trainer={total_steps: 9, save_every: 50}", "model.dtype=bfloat16"]
    free_checkpoints(1, bytes_per_parameter=14)
    room(toy_dir(), tmp_path, *settings)
    free_checkpoints(1, bytes_per_parameter=13)
    with pytest.raises(ResourceError, match="writes 1 checkpoint of"):
        room(toy_dir(), tmp_path, *settings)


def test_where_no_directory_can_be_made_the_disk_is_not_called_full(toy_dir):
    with pytest.raises(ResourceError, match="'/proc/x' cannot be written: .* for a new directory in /proc") as caught:
        room(toy_dir(), Path("/proc/x"))
    assert "Set trainer.run_dir to a directory you may write to" in caught.value.remedy


@pytest.mark.parametrize("name", ["notes", "notes/deeper"])
def test_a_file_cannot_be_the_run_directory_nor_hold_it(toy_dir, tmp_path, name):
    (tmp_path / "notes").touch()
    with pytest.raises(ResourceError, match=f"{name}' cannot be written: {tmp_path}/notes is a file"):
        room(toy_dir(), tmp_path / name)
