"""The driver's state as JSON that round-trips exactly: floats to the last bit, tuples as tuples, bytes as bytes."""

import base64
import json
from typing import cast

from hybridflow.errors import CheckpointError

_TUPLE, _BYTES = "__tuple__", "__bytes__"


def dumps(state: dict) -> str:
    """JSON text of a state of dicts with string keys, lists, tuples, strings, bytes, numbers, booleans and None.

    Floats round-trip because Python writes their shortest exact decimals; NaN and infinities use Python's extension.
    """
    return json.dumps(_plain(state, "state"), indent=1) + "\n"


def loads(text: str) -> dict:
    """The state that `dumps` wrote."""
    return cast(dict, json.loads(text, object_hook=_restored))


def _plain(value: object, place: str) -> object:
    # Exact types only: a subclass (an enum, a NumPy scalar) would load as another type.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is bytes:
        return {_BYTES: base64.b64encode(value).decode()}
    if type(value) is list or type(value) is tuple:
        items = [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return {_TUPLE: items} if type(value) is tuple else items
    if isinstance(value, dict) and all(type(key) is str and key not in (_TUPLE, _BYTES) for key in value):
        return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{place} cannot be saved in a checkpoint's driver state: {type(value).__name__} {str(value)[:60]!r}.",
        remedy="Let state() return dicts with string keys, lists, tuples, strings, bytes, numbers, booleans and None.",
    )


def _restored(found: dict) -> object:
    if found.keys() == {_TUPLE}:
        return tuple(found[_TUPLE])
    if found.keys() == {_BYTES}:
        return base64.b64decode(found[_BYTES])
    return found
