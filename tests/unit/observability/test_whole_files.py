"""Files that are replaced as a whole."""

import pytest

from hybridflow.observability.whole_files import replace_file


def test_an_error_leaves_the_earlier_content_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    assert replace_file(path, "a: é\n") == path and path.read_text(encoding="utf-8") == "a: é\n"

    def no_space(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"b")
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text(encoding="utf-8") == "a: é\n"
