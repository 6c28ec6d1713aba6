"""Hashing of many files, by threads and by ranks."""

import hashlib

import pytest

from hybridflow.parallel.file_records import Written, all_files, files_below, record_files, shared_out


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "actor" / "deep").mkdir(parents=True)
    for name, size in (("actor/a", 0), ("actor/deep/b", 3), ("c", 300_000)):
        (tmp_path / name).write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    return tmp_path


def test_files_below_a_directory_are_told_with_their_sizes(folder):
    assert files_below(folder) == {"actor/a": 0, "actor/deep/b": 3, "c": 300_000}


@pytest.mark.parametrize("threads", [None, 1, 8])
def test_records_are_those_of_the_files(folder, threads):
    records = record_files(folder, files_below(folder), threads=threads)
    for name, record in records.items():
        data = (folder / name).read_bytes()
        assert (record.bytes, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert list(records) == ["actor/a", "actor/deep/b", "c"]
    assert record_files(folder, []) == {}


def test_a_file_that_is_missing_is_an_error(folder):
    with pytest.raises(FileNotFoundError):
        record_files(folder, ["c", "d"])


@pytest.mark.parametrize("parts", [1, 3, 20])
def test_files_are_shared_out_once_each_in_loads_that_are_about_equal(parts):
    sizes = {f"file{number}": 10 + number for number in range(16)}
    shares = shared_out(sizes, parts)
    assert len(shares) == parts
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares if share]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_the_answers_of_several_ranks_are_one_part(folder):
    records = record_files(folder, files_below(folder))
    answers = [Written({name: record}) for name, record in records.items()]
    assert all_files(answers) == all_files(Written(records)) == records
