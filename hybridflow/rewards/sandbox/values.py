"""Decodes values that a program reported, without trusting it: the results are plain values of Python's own types.

`jail.py` encodes them as JSON. Booleans, numbers and strings stand for themselves; anything else is a list that begins
with its kind: `["None"]`, `["int", "0x1f"]`, `["tuple", 1, 2]`, `["dict", [key, value], ...]`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction

_LONGEST_RANGE = 100_000
"""Searching a float in a range takes time in proportion to its length, and reporting a long one takes none."""
_LONGEST_INTEGER, _LONGEST_FRACTION = 25_000, 2_500
"""Hexadecimal digits: 100,000 bits, and 10,000 in each part of a fraction, because its common divisor is computed."""
_MOST_OF_ONE_HASH = 100
"""Members of a set with equal hashes are compared pairwise, and such integers are easy to construct."""


def decoded(encoded: object) -> object:
    """The value that parsed JSON encodes. Raises `ValueError` or `TypeError` if it encodes none."""
    match encoded:
        case bool() | int() | float() | str():
            return encoded
        case ["None"]:
            return None
        case ["int", str(digits)] if len(digits) <= _LONGEST_INTEGER:
            return int(digits, 16)
        case ["fraction", str(over), str(under)] if max(len(over), len(under)) <= _LONGEST_FRACTION:
            return Fraction(int(over, 16), int(under, 16))
        case ["complex", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["range", int(start), int(stop), int(step)] if len(range(start, stop, step)) <= _LONGEST_RANGE:
            return range(start, stop, step)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case [kind, *parts] if isinstance(kind, str) and kind in _CONTAINERS:
            return _CONTAINERS[kind]([_pair(part) if kind == "dict" else decoded(part) for part in parts])
    raise ValueError(f"not a value: {encoded!r:.100}")


def set_of(members: Iterable[Hashable] = ()) -> set:
    """A set. Raises `ValueError` if so many members have equal hashes that making it would take long."""
    found = list(members)
    hashes = sorted(map(hash, found))
    if any(first == last for first, last in zip(hashes, hashes[_MOST_OF_ONE_HASH:], strict=False)):
        raise ValueError(f"more than {_MOST_OF_ONE_HASH} of {len(found)} members have the same hash")
    return set(found)


def dict_of(pairs: Mapping | Iterable[tuple[Hashable, object]] = ()) -> dict:
    """A dict, with the same check of its keys."""
    items = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    set_of(key for key, _ in items)
    return dict(items)


def frozenset_of(members: Iterable[Hashable] = ()) -> frozenset:
    """A frozenset, with the same check."""
    return frozenset(set_of(members))


def _pair(encoded: object) -> tuple[object, object]:
    match encoded:
        case [key, value]:
            return decoded(key), decoded(value)
    raise ValueError(f"not a key with its value: {encoded!r:.100}")


_CONTAINERS: dict[object, Callable[[list], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set_of,
    "frozenset": frozenset_of,
    "dict": dict_of,
}
