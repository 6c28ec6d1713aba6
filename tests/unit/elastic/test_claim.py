"""One process at a time has a run's directory, from before its checkpoints are read until the run ends."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridflow.elastic.claim import check_in_place, claim, is_claimed, release
from hybridflow.errors import ResourceError


@contextmanager
def held_elsewhere(run_dir: Path) -> Iterator[None]:
    """Another open file locks the directory in the block, as another process would: locks are of open files."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def test_a_directory_that_another_process_has_claimed_is_refused(tmp_path):
    with held_elsewhere(tmp_path), pytest.raises(ResourceError, match="is being written by another process"):
        claim(tmp_path)


def test_a_directory_that_was_not_there_goes_if_nothing_is_written(tmp_path):
    run_dir = tmp_path / "runs" / "new"
    claim(run_dir)
    assert is_claimed(run_dir)
    release(run_dir)
    assert not run_dir.exists()
    claim(run_dir)
    (run_dir / "run.log").write_text("")
    release(run_dir)
    assert (run_dir / "run.log").is_file()


def test_a_directory_that_was_there_stays_though_it_is_empty(tmp_path):
    claim(tmp_path)
    release(tmp_path)
    assert tmp_path.is_dir()


def test_a_directory_renamed_by_its_holder_can_be_claimed_anew(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    claim(run_dir)
    run_dir.rename(tmp_path / "run.1")
    with pytest.raises(ResourceError, match="was deleted or moved"):
        check_in_place(run_dir)
    claim(run_dir)
    check_in_place(run_dir)
    with pytest.raises(ResourceError, match="another run of this process"):
        claim(run_dir)
    with held_elsewhere(tmp_path / "run.1"):
        release(run_dir)


def test_a_directory_that_cannot_be_made_is_left_to_the_log_to_name(tmp_path):
    (tmp_path / "file").write_text("")
    claim(tmp_path / "file" / "run")
    claim(tmp_path / "file")
    check_in_place(tmp_path / "file")


def test_a_claim_outlasts_a_look_at_whether_the_directory_is_claimed(tmp_path):
    looking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_claimed` does
    threading.Timer(0.1, os.close, [looking]).start()
    claim(tmp_path)
    assert is_claimed(tmp_path)
    release(tmp_path)
    assert not is_claimed(tmp_path)
