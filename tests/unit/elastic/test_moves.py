"""Files that moved between a run and its resumption."""

import pytest

from hybridflow.elastic.compatibility import with_moves_undone


@pytest.mark.parametrize(
    ("old", "new", "is_moved"),
    [
        ("a/x.jsonl", "b/c/x.jsonl", True),
        ("a/x?split=train", "b/x?split=train", True),
        ("x?split=a/b", "x?split=c/b", False),
        ("verl:a/x.py:f", "verl:b/x.py:f", True),
    ],
)
def test_only_directories_may_differ(old, new, is_moved):
    digests = {"": "sha"}
    before, after = ({path: digests, path.removeprefix("verl:").removesuffix(":f"): digests} for path in (old, new))
    settings = with_moves_undone({"files": [old]}, {"files": [new]}, ["files"], before, after)
    assert settings["files"] == ([old] if is_moved else [new])
