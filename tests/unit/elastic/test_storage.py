"""Directories that appear whole or not at all."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybridflow.elastic.storage import settle, write_aside
from hybridflow.errors import CheckpointError, EngineError, ResourceError
from tests.unit.elastic.mounts import run_with_mount

A_DEAD_PROCESS = subprocess.Popen([sys.executable, "-c", ""])
A_DEAD_PROCESS.wait()
HERE = os.uname().nodename


def aside(final: Path, kind: str, *, pid: int, host: str = HERE) -> Path:
    path = final.with_name(f".{final.name}.{kind}-{host}-{pid}")
    path.mkdir(parents=True)
    (path / "file").write_text(kind)
    return path


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_directory_appears_whole_when_the_block_ends(is_replaced, tmp_path):
    final = tmp_path / "checkpoints" / "step_1"
    if is_replaced:
        final.mkdir(parents=True)
        (final / "old").write_text("old")
    with write_aside(final) as partial:
        (partial / "new").write_text("new")
        assert final.exists() is is_replaced and not (final / "new").exists()
    assert [path.name for path in final.iterdir()] == ["new"]
    assert [path.name for path in final.parent.iterdir()] == ["step_1"]


def test_an_error_in_the_block_leaves_the_old_directory_and_nothing_else(tmp_path):
    final = tmp_path / "step_1"
    final.mkdir()
    (final / "file").write_text("old")
    with pytest.raises(KeyError, match="our own"), write_aside(final) as partial:
        (partial / "file").write_text("new")
        raise KeyError("our own")
    assert (final / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


@pytest.mark.parametrize("kind", ["partial", "deleted"])
@pytest.mark.parametrize(
    ("pid", "host", "is_old", "is_removed"),
    [
        pytest.param(A_DEAD_PROCESS.pid, HERE, False, True, id="dead"),
        pytest.param(os.getppid(), HERE, False, False, id="alive"),
        pytest.param(os.getppid(), HERE, True, True, id="older than the process of that number"),
        pytest.param(1, "another-host", False, False, id="on another machine"),
        pytest.param(1, "another-host", True, True, id="on another machine, older than a day"),
    ],
)
def test_leftovers_of_the_dead_are_removed_and_of_the_living_are_not(kind, pid, host, is_old, is_removed, tmp_path):
    leftover = aside(tmp_path / "step_1", kind, pid=pid, host=host)
    if is_old:
        os.utime(leftover, (1, 1))
    settle(tmp_path)
    assert leftover.exists() is not is_removed


def test_what_was_being_replaced_comes_back_only_if_its_successor_did_not(tmp_path):
    aside(tmp_path / "step_1", "replaced", pid=A_DEAD_PROCESS.pid)
    aside(tmp_path / "step_2", "replaced", pid=A_DEAD_PROCESS.pid)
    (tmp_path / "step_2").mkdir()
    settle(tmp_path)
    assert (tmp_path / "step_1" / "file").read_text() == "replaced"
    assert not any((tmp_path / "step_2").iterdir())


@pytest.mark.parametrize("tells", ["by number", "in words"])
@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "The disk is full"),
        (errno.EDQUOT, "The disk quota is used up"),
        (errno.EFBIG, r"The file is too large for .*\(ulimit -f\)"),
    ],
)
def test_a_file_system_that_takes_no_more_is_named_with_its_free_bytes_and_a_remedy(number, why, tells, tmp_path):
    words = rf"{why}: .*step_1.*5 bytes were, \d+ are free.*raise the limit, lower trainer.keep_checkpoints"
    with pytest.raises(ResourceError, match=words), write_aside(tmp_path / "step_1") as partial:
        (partial / "file").write_text("begun")
        if tells == "by number":
            raise OSError(number, os.strerror(number))
        raise EngineError(f"actor.save failed: OSError: [Errno {number}] {os.strerror(number)}", remedy="See there.")
    assert not any(tmp_path.iterdir())


def test_torch_save_beyond_the_limit_on_a_files_size_names_the_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(ResourceError, match=r"ulimit -f.*raise the limit"), write_aside(tmp_path / "step_1") as at:
            torch.save({"x": torch.zeros(1 << 20)}, at / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    below_a_file = tmp_path / "checkpoints" / "step_1"
    with pytest.raises(CheckpointError, match=r"could not be written.*trainer\.run_dir"), write_aside(below_a_file):
        pass


FILL_A_DISK = """
import sys, pathlib, torch
from safetensors.torch import save_file
from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.errors import ResourceError
from tests.unit.elastic.victim import save
tensor = {"x": torch.zeros(1 << 20)}
writers = {
    "python": lambda d: (d / "x").write_bytes(bytes(4 << 20)),
    "torch": lambda d: torch.save(tensor, d / "x"),
    "safetensors": lambda d: save_file(tensor, d / "x"),
}
store = CheckpointStore(pathlib.Path(sys.argv[1]))
save(store, 1)
for name, write in writers.items():
    try:
        store.save(2, write, {"step": 2})
    except ResourceError as error:
        assert "The disk is full" in str(error), error
    else:
        sys.exit(name + " did not fail")
    assert store.latest().step == 1 and len(list(store.directory.iterdir())) == 1
"""


def test_a_disk_that_is_really_full_leaves_the_earlier_checkpoint_whole(tmp_path):
    """On a file system of 2 MB, in a mount namespace of its own; libraries report a full disk in three ways."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run_with_mount(f"mount -t tmpfs -o size=2m tmpfs {disk}", FILL_A_DISK, disk)


def test_writing_removes_what_the_dead_left(tmp_path):
    dead = aside(tmp_path / "step_1", "partial", pid=A_DEAD_PROCESS.pid)
    own = aside(tmp_path / "step_2", "partial", pid=os.getpid())
    with write_aside(tmp_path / "step_2") as partial:
        assert partial == own
        assert not any(partial.iterdir())
    assert not dead.exists()


def test_a_leftover_that_cannot_be_removed_is_warned_of(tmp_path, caplog):
    """One is a symbolic link, which goes without its target; the other is a file, which is no leftover of ours."""
    target = tmp_path / "elsewhere"
    target.mkdir()
    link = tmp_path / f".step_1.deleted-{HERE}-{A_DEAD_PROCESS.pid}"
    link.symlink_to(target)
    kept = tmp_path / f".step_2.partial-{HERE}-{A_DEAD_PROCESS.pid}"
    kept.write_text("not a directory, which rmtree refuses")
    settle(tmp_path)
    assert target.is_dir() and not link.is_symlink()
    assert kept.exists()
    assert f"leftover={kept} of an earlier save could not be removed" in caplog.text
