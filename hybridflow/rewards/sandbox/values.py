"""Values that a program told, read without trusting it: only plain ones come out, of Python's own types.

`jail.py` writes them as JSON. Truth values, numbers and text stand for themselves; all else is a list that begins with
its kind: `["None"]`, `["int", "0x1f"]`, `["tuple", 1, 2]`, `["dict", [key, value], ...]`.
"""

from collections.abc import Callable
from fractions import Fraction

_CONTAINERS: dict[object, Callable[[list], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
_LONGEST_RANGE = 100_000
"""To look for a float in a range takes time, and to write one down takes none."""


def told_value(told: object) -> object:
    """The value that some JSON says. Raises `ValueError` or `TypeError` where it says none."""
    match told:
        case bool() | int() | float() | str():
            return told
        case ["None"]:
            return None
        case ["int", str(digits)]:
            return int(digits, 16)
        case ["fraction", str(over), str(under)]:
            return Fraction(int(over, 16), int(under, 16))
        case ["complex", float(real), float(imaginary)]:
            return complex(real, imaginary)
        case ["range", int(start), int(stop), int(step)] if len(range(start, stop, step)) <= _LONGEST_RANGE:
            return range(start, stop, step)
        case ["bytes", str(digits)]:
            return bytes.fromhex(digits)
        case [kind, *parts] if isinstance(kind, str) and kind in _CONTAINERS:
            return _CONTAINERS[kind]([_pair(part) if kind == "dict" else told_value(part) for part in parts])
    raise ValueError(f"this is no value: {told!r:.100}")


def _pair(told: object) -> tuple[object, object]:
    match told:
        case [key, value]:
            return told_value(key), told_value(value)
    raise ValueError(f"this is no key with its value: {told!r:.100}")
