"""JSON of others is parsed within limits; what cannot be used is a ValueError that says why."""

import json

import pytest

from hybridflow.config.json_text import DEEPEST, parse_json, read_json_object


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, "\u00e9\U0001f600"]}, [], "text", -3, {"big": 10**4000}])
def test_what_json_writes_comes_back(value):
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_values_may_be_nested_up_to_a_limit():
    assert parse_json(nested(DEEPEST)) is not None
    wide = b"[" + b",".join([nested(DEEPEST - 1)] * 3) + b"]"
    assert len(parse_json(wide)) == 3
    for levels in (DEEPEST + 1, 990, 100_000):
        with pytest.raises(ValueError, match=f"more than {DEEPEST} levels deep"):
            parse_json(nested(levels))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'{"n": ' + b"9" * 5000 + b"}", "number of more digits"),
        (rb'{"prompt": "a\ud800b"}', r"\\ud800 is half of a surrogate pair"),
        (rb'{"\udfff": 1}', r"\\udfff is half"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        (b'{"a": ', "Expecting value"),
    ],
)
def test_what_cannot_be_used_is_said(text, found):
    with pytest.raises(ValueError, match=found):
        parse_json(text)


def test_a_description_is_an_object_of_limited_size(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json_object(path) == {"a": 1}
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"is of type list, not an object"):
        read_json_object(path)
    monkeypatch.setattr("hybridflow.config.json_text.LARGEST_BYTES", 2)
    with pytest.raises(ValueError, match="it has 3 bytes, more than 2"):
        read_json_object(path)
