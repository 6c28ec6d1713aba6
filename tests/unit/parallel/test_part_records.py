"""Ranks that write in threads agree through files on who hashes what, and the driver reads when all have ended."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError
from hybridflow.parallel.file_records import files_below, record_files
from hybridflow.parallel.part_records import FOLDER, PartWriter, recorded_parts, wait_for

NEVER = threading.Event()


def writer(directory: Path, rank: int, num_ranks: int, write: Callable[[], None] | None) -> PartWriter:
    return PartWriter(write, directory, "actor", rank=rank, num_ranks=num_ranks)


def writing(directory: Path, rank: int) -> Callable[[], None]:
    def write() -> None:
        (directory / "actor" / f"{rank}.bin").write_bytes(bytes([rank]) * (rank + 1) * 1000)

    return write


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_all_files_are_recorded_once_and_only_when_every_rank_has_written(num_ranks, tmp_path):
    (tmp_path / "actor").mkdir()
    last_may_write = threading.Event()

    def write_last() -> None:
        last_may_write.wait()
        writing(tmp_path, num_ranks - 1)()

    writers = [writer(tmp_path, rank, num_ranks, writing(tmp_path, rank)) for rank in range(num_ranks - 1)]
    writers.append(writer(tmp_path, num_ranks - 1, num_ranks, write_last))
    for each in writers:
        each.start()
    for each in writers:
        each.check(wait=False)
    assert recorded_parts(tmp_path, {"actor": num_ranks}) is None
    last_may_write.set()
    parts = wait_for(lambda: recorded_parts(tmp_path, {"actor": num_ranks}), NEVER)
    for each in writers:
        each.check(wait=True)
    names = [name for name in files_below(tmp_path) if name.startswith("actor/")]
    assert len(names) == num_ranks
    assert parts == {"actor": record_files(tmp_path, names)}
    shares = [json.loads(path.read_text()) for path in (tmp_path / FOLDER).glob("*.json")]
    assert sorted(len(share) for share in shares) == [1] * num_ranks


def test_several_roles_are_complete_together(tmp_path):
    for role in ("actor", "critic"):
        (tmp_path / role).mkdir()
        (tmp_path / role / "x").write_text(role)
    writer(tmp_path, 0, 1, None).start()
    ranks = {"actor": 1, "critic": 1}
    wait_for(lambda: recorded_parts(tmp_path, {"actor": 1}), NEVER)
    assert recorded_parts(tmp_path, ranks) is None
    PartWriter(None, tmp_path, "critic", rank=0, num_ranks=1).start()
    assert [*wait_for(lambda: recorded_parts(tmp_path, ranks), NEVER)["critic"]] == ["critic/x"]


def test_an_error_of_the_writing_is_raised_by_check(tmp_path):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "actor").mkdir()
    failing = writer(tmp_path, 0, 1, fail)
    failing.start()
    for wait in (True, False):
        with pytest.raises(OSError, match="No space left"):
            failing.check(wait=wait)
    assert recorded_parts(tmp_path, {"actor": 1}) is None


def test_a_rank_that_waits_for_another_can_be_ended(tmp_path):
    (tmp_path / "actor").mkdir()
    waiting = writer(tmp_path, 0, 2, None)
    waiting.start()
    waiting.abandon()
    with pytest.raises(CheckpointError, match="was abandoned"):
        waiting.check(wait=True)
    assert not any((tmp_path / FOLDER).iterdir())


def test_a_rank_does_not_wait_in_a_directory_that_was_removed(tmp_path):
    with pytest.raises(FileNotFoundError):
        gone = writer(tmp_path / "gone", 0, 2, None)
        gone.start()
        gone.check(wait=True)
