"""Values that a program reported, read without trusting it: only plain ones come out, of Python's own types.

`jail.py` writes them as JSON. Truth values, numbers and text stand for themselves; all else is a list that begins with
its kind: `["None"]`, `["int", "0x1f"]`, `["tuple", 1, 2]`, `["dict", [key, value], ...]`.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from fractions import Fraction

_LONGEST_RANGE = 100_000
"""To look for a float in a range takes time, and to write one down takes none."""
_LONGEST_INTEGER, _LONGEST_FRACTION = 25_000, 2_500
"""Hexadecimal digits: 100,000 bits, and 10,000 in each half of a fraction, where a common divisor is looked for."""
_MOST_OF_ONE_HASH = 100
"""Members of a set that share a hash are compared each with each, and such integers are easy to construct."""


def reported_value(reported: object) -> object:
    """The value that some JSON says. Raises `ValueError` or `TypeError` where it says none."""
    match reported:
        case bool() | int() | float() | str():
            return reported
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
            return _CONTAINERS[kind]([_pair(part) if kind == "dict" else reported_value(part) for part in parts])
    raise ValueError(f"this is no value: {reported!r:.100}")


def set_of(members: Iterable[Hashable] = ()) -> set:
    """A set. Raises `ValueError` where so many members share a hash that it would take long to make."""
    found = list(members)
    hashes = sorted(map(hash, found))
    if any(first == last for first, last in zip(hashes, hashes[_MOST_OF_ONE_HASH:], strict=False)):
        raise ValueError(f"more than {_MOST_OF_ONE_HASH} of {len(found)} members have one hash")
    return set(found)


def dict_of(pairs: Mapping | Iterable[tuple[Hashable, object]] = ()) -> dict:
    """The same for the keys of a dict."""
    items = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    set_of(key for key, _ in items)
    return dict(items)


def frozenset_of(members: Iterable[Hashable] = ()) -> frozenset:
    """The same for a set that does not change."""
    return frozenset(set_of(members))


def _pair(reported: object) -> tuple[object, object]:
    match reported:
        case [key, value]:
            return reported_value(key), reported_value(value)
    raise ValueError(f"this is no key with its value: {reported!r:.100}")


_CONTAINERS: dict[object, Callable[[list], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set_of,
    "frozenset": frozenset_of,
    "dict": dict_of,
}
