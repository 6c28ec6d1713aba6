"""JSON from untrusted files and programs, parsed within limits: invalid input always raises a `ValueError`."""

import json
import re
from pathlib import Path

DEEPEST = 64
"""Deepest nesting of lists and objects."""

LARGEST_BYTES = 1 << 28
"""Largest file that describes a model or an adapter."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(text: bytes) -> object:
    """The value of a JSON text in UTF-8.

    Raises a `ValueError`: `UnicodeDecodeError` and `json.JSONDecodeError` with their positions, a plain one for values
    nested more than `DEEPEST` levels deep, numbers of thousands of digits, and half a surrogate pair, which UTF-8
    cannot represent.
    """
    try:
        found = json.loads(text.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except ValueError as error:
        raise ValueError("it has a number of more digits than can be read") from error
    if text.count(b"[") + text.count(b"{") > DEEPEST:
        _check_depth(found)
    if _SURROGATE.search(text):
        _check_surrogates(found)
    return found


def read_json_object(path: Path) -> dict:
    """The object in a JSON file. Raises `OSError`, or a `ValueError` as `parse_json` does, also for other values."""
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"it has {size} bytes, more than {LARGEST_BYTES}")
    found = parse_json(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"it is of type {type(found).__name__}, not an object {{...}}")
    return found


_TOO_DEEP = f"its values are nested more than {DEEPEST} levels deep"


def _check_depth(found: object) -> None:
    level = [found]
    for _ in range(DEEPEST + 1):
        inner = [value for value in level if isinstance(value, list | dict)]
        if not inner:
            return
        level = [item for value in inner for item in (value if isinstance(value, list) else value.values())]
    raise ValueError(_TOO_DEEP)


def _check_surrogates(found: object) -> None:
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"\\u{code:04x} is half of a surrogate pair, not a character") from error
