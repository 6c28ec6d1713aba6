"""Digests of files: of every byte of a small one, of each weight of a large one."""

import pytest
import torch
from safetensors.torch import save_file

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


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A function: weights -> the fingerprint of a file of them, which counts as large."""
    monkeypatch.setattr(fingerprints, "_WHOLE_BYTES", 1000)

    def fingerprint(named: dict[str, torch.Tensor]) -> str:
        save_file(named, tmp_path / "model.safetensors")
        return file_fingerprint(tmp_path / "model.safetensors")

    return fingerprint


def test_each_weight_of_a_large_file_counts_and_so_does_its_name(weights):
    named = {f"layers.{number}": torch.full((64, 128), float(number)) for number in range(40)}
    whole = weights(named)
    assert whole.startswith("sampled:") and weights(named) == whole
    for name in named:
        assert weights(named | {name: named[name] + 1e-3}) != whole
    renamed = {name.replace("layers.3", "layers.x"): weight for name, weight in named.items()}
    assert weights(renamed) != whole


def test_a_large_file_of_another_kind_is_sampled_all_over(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprints, "_WHOLE_BYTES", 1000)
    for name in ("pytorch_model.bin", "broken.safetensors"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
        whole = file_fingerprint(tmp_path / name)
        (tmp_path / name).write_bytes(bytes(1 << 19) + b"\1" * (1 << 19))
        assert file_fingerprint(tmp_path / name) != whole


def test_changed_added_and_removed_files_are_named_and_new_sources_are_not():
    saved = {"a.jsonl": {"": "1"}, "m": {"x": "1", "y": "2"}, "gone.py": {"": "3"}}
    now = {"a.jsonl": {"": "9"}, "m": {"y": "2", "z": "3"}, "new.py": {"": "4"}}
    with pytest.raises(CheckpointError, match=r"a\.jsonl, m/x, m/z\.") as caught:
        check_unchanged(saved, now, ResumeChanged.refuse)
    assert "trainer.resume_changed=accept" in caught.value.remedy
    assert check_unchanged(saved, now, ResumeChanged.accept) == ["a.jsonl", "m/x", "m/z"]
    assert check_unchanged({}, now, ResumeChanged.refuse) == []
