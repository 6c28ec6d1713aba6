"""Digests of files: of every byte, up to a size beyond which samples and the date stand for them."""

import os

import pytest

from hybridflow.config.loop import ResumeChanged
from hybridflow.elastic import fingerprints
from hybridflow.elastic.fingerprints import check_unchanged, file_fingerprint
from hybridflow.errors import CheckpointError


def test_each_byte_of_a_small_file_counts(tmp_path):
    (tmp_path / "a").write_bytes(bytes(1000))
    whole = file_fingerprint(tmp_path / "a")
    for place in (0, 500, 999):
        (tmp_path / "a").write_bytes(bytes(place) + b"\1" + bytes(999 - place))
        assert file_fingerprint(tmp_path / "a") != whole
    (tmp_path / "a").write_bytes(bytes(1000))
    assert file_fingerprint(tmp_path / "a") == whole


def test_any_byte_of_a_file_of_many_megabytes_counts(tmp_path):
    line = b'{"prompt": "1+1=", "answer": "2"}\n'
    count = (80 << 20) // len(line)
    path = tmp_path / "large.jsonl"
    path.write_bytes(line * count)
    whole = file_fingerprint(path)
    with path.open("r+b") as file:
        file.seek(len(line) * (count // 2 + 1000) + line.index(b"2"))
        file.write(b"3")
    assert file_fingerprint(path) != whole


def test_a_file_too_large_to_hash_whole_is_sampled_from_start_to_end_and_dated(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "_BLOCK_BYTES", 16)
    path, size = tmp_path / "pytorch_model.bin", 1 << 20

    def fingerprint(content: bytes, modified: int = 5) -> str:
        path.write_bytes(content)
        os.utime(path, ns=(modified, modified))
        return file_fingerprint(path)

    whole = fingerprint(bytes(size))
    assert whole.startswith("sampled:") and fingerprint(bytes(size)) == whole
    assert fingerprint(bytes(size), modified=6) != whole
    assert fingerprint(bytes(size + 1)) != whole
    for place in range(0, size, size // 64):
        assert fingerprint(bytes(place) + b"\1" * 256 + bytes(size - place - 256)) != whole
    assert fingerprint(bytes(size - 1) + b"\1") != whole


def test_changed_added_and_removed_files_are_named_and_new_sources_are_not():
    saved = {"a.jsonl": {"": "1"}, "m": {"x": "1", "y": "2"}, "gone.py": {"": "3"}}
    now = {"a.jsonl": {"": "9"}, "m": {"y": "2", "z": "3"}, "new.py": {"": "4"}}
    with pytest.raises(CheckpointError, match=r"a\.jsonl, m/x, m/z\.") as caught:
        check_unchanged(saved, now, ResumeChanged.refuse)
    assert "trainer.resume_changed=accept" in caught.value.remedy
    assert check_unchanged(saved, now, ResumeChanged.accept) == ["a.jsonl", "m/x", "m/z"]
    assert check_unchanged({}, now, ResumeChanged.refuse) == []
