"""Hashing of many files by several threads."""

import hashlib

import pytest

from hybridflow.parallel.file_records import files_below, record_files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "actor" / "deep").mkdir(parents=True)
    for name, size in (("actor/a", 0), ("actor/deep/b", 3), ("c", 300_000)):
        (tmp_path / name).write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    return tmp_path


@pytest.mark.parametrize("threads", [None, 1, 8])
def test_records_are_those_of_the_files(folder, threads):
    sizes = files_below(folder)
    assert sizes == {"actor/a": 0, "actor/deep/b": 3, "c": 300_000}
    records = record_files(folder, sizes, threads=threads)
    for name, record in records.items():
        data = (folder / name).read_bytes()
        assert (record.bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert list(records) == ["actor/a", "actor/deep/b", "c"]
    assert record_files(folder, []) == {}
    with pytest.raises(FileNotFoundError):
        record_files(folder, ["c", "d"])
