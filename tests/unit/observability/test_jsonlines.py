"""JSON lines survive kills, resumes and full disks."""

import errno
import logging
import os
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.observability.fault_ledger import append_faults
from hybridflow.observability.jsonlines import JsonLinesFile, read_rows, set_aside


def _write(path, *rows):
    file = JsonLinesFile(path)
    for row in rows:
        file.append(row)
    file.close()


def test_a_row_comes_back_bit_for_bit_but_for_what_json_and_unicode_lack(tmp_path):
    row = {"step": 1, "loss": 0.1 + 0.2, "tiny": 5e-324, "nan": float("nan"), "inf": float("inf"), "text": "é\ud800\n"}
    file = JsonLinesFile(tmp_path / "a.jsonl")
    file.append(row)  # on disk at once, even if the process is killed
    assert list(read_rows(tmp_path / "a.jsonl")) == [(1, row | {"nan": None, "inf": None, "text": "é?\n"})]
    file.close()


def _steps(path):
    return [step for step, _ in read_rows(path)]


def test_truncating_drops_later_and_torn_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    _write(path, *({"step": step} for step in (0, 1, 2, 2, 3)))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    file = JsonLinesFile(path)
    file.truncate_after(2)
    assert _steps(path) == [0, 1, 2, 2] and [row for _, row in read_rows(path, up_to=0)] == [{"step": 0}]
    file.truncate_after(-1)
    assert path.read_bytes() == b""
    assert os.listdir(tmp_path) == ["a.jsonl"]
    path.write_text('{"step": 1}\n{"step": 2}')  # only the end of the line is lost
    file.truncate_after(2)
    file.append({"step": 3})
    file.close()
    assert _steps(path) == [1, 2, 3]


class Disk:
    """A file on a disk that fails after a number of bytes, until `error` is None."""

    def __init__(self, file, error: OSError | None, room: int) -> None:
        self.file, self.error, self.room = file, error, room

    def write(self, data) -> int:
        if self.error is not None and not self.room:
            raise self.error
        written = self.file.write(bytes(data)[: self.room] if self.error is not None else data)
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize(("number", "found"), [(errno.ENOSPC, "The disk is full"), (errno.EIO, "The file system has")])
def test_a_row_that_cannot_be_written_whole_is_taken_back(tmp_path, number, found):
    path = tmp_path / "a.jsonl"
    _write(path, {"step": 1})
    file = JsonLinesFile(path)
    file._file = disk = Disk(file._file, OSError(number, os.strerror(number)), 7)
    with pytest.raises(ResourceError, match=f"^{found}.*a.jsonl' could not be written"):
        file.append({"step": 2})
    assert path.read_text() == '{"step": 1}\n'
    disk.error = None
    file.append({"step": 2})
    assert _steps(path) == [1, 2]


def test_a_row_after_a_torn_one_begins_a_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    _write(path, {"step": 3}, {"step": 4})
    assert _steps(path) == [1, 3, 4]


def test_a_bad_line_in_the_middle_is_named_and_a_torn_last_line_is_not(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\nnonsense\n' + "[" * 100_000 + '\n{"step": 2}\n{"loss": 1}\n{"st')
    with caplog.at_level(logging.WARNING):
        assert _steps(path) == _steps(path) == [1, 2]  # each line is named once
    assert caplog.messages == [
        f"file={path} line={n} is not a JSON object with a step and is skipped." for n in (2, 3, 5)
    ]


def test_an_earlier_file_is_set_aside_under_the_next_free_name(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path) is None
    for content in ("first", "second"):
        path.write_text(content)
        set_aside(path)
    assert sorted(os.listdir(tmp_path)) == ["metrics.1.jsonl", "metrics.2.jsonl"]
    assert (tmp_path / "metrics.1.jsonl").read_text() == "first"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("deleted", "was deleted or moved: a new file was started, which lacks the earlier rows."),
        ("replaced", "was replaced by another file, which has 1 line: the run continues in that one."),
    ],
)
def test_a_file_that_goes_while_it_is_written_is_opened_again_with_a_warning(how, said, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    file = JsonLinesFile(path)
    file.append({"step": 1})
    path.unlink()
    if how == "replaced":
        path.write_text('{"step": 0}\n')
    file.append({"step": 2})
    file.append({"step": 3})
    file.close()
    assert _steps(path) == ([0] if how == "replaced" else []) + [2, 3]
    assert caplog.messages == [f"file={path} {said}"]


def test_a_fault_that_cannot_be_recorded_on_a_full_disk_does_not_replace_the_error_that_it_records(caplog):
    append_faults(Path("/dev/full"), [{"step": 3, "fault": "ResourceError"}])
    assert "file=/dev/full cannot be written" in caplog.text
