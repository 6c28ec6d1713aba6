"""Where a run starts, and how an earlier run is moved out of its way."""

from pathlib import Path

import pytest

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.claim import claim, release
from hybridflow.elastic.resuming import resolve_resume, set_aside, set_later_aside
from hybridflow.errors import CheckpointError, ResourceError
from tests.unit.elastic.victim import store_with


def test_auto_takes_the_newest_and_never_takes_none(tmp_path):
    store = store_with(tmp_path, 1, 2)
    newest = resolve_resume("auto", store, 10)
    assert newest is not None and newest.step == 2
    assert resolve_resume("never", store, 10) is None
    assert resolve_resume("auto", CheckpointStore(tmp_path / "new"), 10) is None


def test_a_path_is_taken_though_it_is_not_the_newest(tmp_path):
    store = store_with(tmp_path, 1, 2)
    chosen = resolve_resume(str(store.paths()[0]), store, 10)
    assert chosen is not None and chosen.step == 1


@pytest.mark.parametrize("path", [".", "checkpoints", "checkpoints/step_7", "elsewhere"])
def test_a_path_that_is_no_checkpoint_names_the_nearest(path, tmp_path):
    store = store_with(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"(does not exist|is not a checkpoint).*Nearest: .*/step_2"):
        resolve_resume(str(tmp_path / path), store, 10)


def test_a_run_beyond_its_total_steps_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"at step 5, beyond trainer\.total_steps=4.*above 5"):
        resolve_resume("auto", store_with(tmp_path, 5), 4)


def test_a_run_set_aside_loses_nothing(tmp_path):
    run_dir = tmp_path / "calculator"
    assert set_aside(run_dir) is None
    for number in (1, 2):
        run_dir.mkdir()
        assert set_aside(run_dir) is None
        (run_dir / "metrics.jsonl").write_text(str(number))
        assert set_aside(run_dir) == tmp_path / f"calculator.{number}"
        assert not run_dir.exists()
    assert [(tmp_path / f"calculator.{n}/metrics.jsonl").read_text() for n in (1, 2)] == ["1", "2"]


def test_checkpoints_after_the_one_resumed_from_step_aside(tmp_path):
    store = store_with(tmp_path, 1, 2, 3)
    moved = set_later_aside(store, store.open(store.paths()[0]))
    assert [path.name for path in moved] == ["step_2.1", "step_3.1"]
    assert all(store.open(path) for path in moved)


def linked(run_dir: Path, name: str) -> Path:
    """Moves a part of a run to another disk and leaves a symbolic link in its place; returns the target."""
    target = run_dir.parent / "big" / Path(name).name
    target.parent.mkdir()
    (run_dir / name).rename(target)
    (run_dir / name).symlink_to(target)
    return target


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step_2", "checkpoints/step_1"])
def test_checkpoints_behind_a_link_are_the_run_s_own(name, tmp_path):
    store, other = store_with(tmp_path / "run", 1, 2), store_with(tmp_path / "other", 2)
    target = linked(tmp_path / "run", name)
    newest = resolve_resume("auto", store, 10)
    assert newest is not None and newest.step == 2 and store.is_own(newest.path)
    for path in (newest.path, newest.path.resolve(), target if name.endswith("2") else target.resolve()):
        assert store.is_own(path)
    assert not store.is_own(other.paths()[0])
    assert set_later_aside(store, store.open(newest.path.resolve())) == []
    assert [path.name for path in set_later_aside(store, store.open(store.paths()[0]))] == ["step_2.1"]
    assert [path.name for path in store.paths()] == ["step_1"]


def test_checkpoints_on_a_disk_that_is_not_mounted_are_told_and_not_passed_over(tmp_path):
    store = store_with(tmp_path / "run", 1)
    target = linked(tmp_path / "run", "checkpoints")
    target.rename(tmp_path / "unmounted")
    with pytest.raises(
        ResourceError, match="run/checkpoints' is a symbolic link to '.*/big/checkpoints', which does not"
    ):
        resolve_resume("auto", store, 10)
    assert resolve_resume("never", store, 10) is None


def test_of_a_link_the_target_is_set_aside_and_a_new_run_lands_there(tmp_path):
    big, link = tmp_path / "big" / "run", tmp_path / "run"
    big.mkdir(parents=True)
    link.symlink_to(big)
    (big.parent / "run.1").symlink_to("nothing")
    for number in (2, 3):
        claim(link)
        (link / "metrics.jsonl").write_text(str(number))
        assert set_aside(link) == big.with_name(f"run.{number}")
        claim(link)
        release(link)
    assert link.is_symlink() and link.resolve() == big
    assert [(big.parent / f"run.{n}/metrics.jsonl").read_text() for n in (2, 3)] == ["2", "3"]
