"""Plain values from untrusted text: the literals of tests, and the values that a program reports.

Tests come from data files, and their literals are evaluated in the trainer's own process. The size of a result that a
few characters could make large (`10**10**8`, `list(range(10**9))`, `"a" * 10**9`) is therefore computed first.

`jail.py` encodes a program's values as JSON. Booleans, numbers and strings stand for themselves; anything else is a
list that begins with its kind: `["None"]`, `["int", "0x1f"]`, `["tuple", 1, 2]`, `["dict", ["tuple", "a", 1], ...]`.
"""

import ast
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

_OPERATORS: Mapping[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
_CONSTANTS = ("e", "inf", "nan", "pi", "tau")
_LONGEST_RANGE = 100_000
"""Searching a range for a float takes time proportional to its length, while reporting a long range takes none."""
_LONGEST_INTEGER, _LONGEST_FRACTION = 25_000, 2_500
"""Hexadecimal digits: 100,000 bits, and 10,000 for each part of a fraction, since their common divisor is computed."""
_MOST_OF_ONE_HASH = 100
"""Members of a set with equal hashes are compared pairwise, and integers with equal hashes are easy to construct."""


class NotLiteral(ValueError):
    """An expression that is not a literal, or whose value is too large."""


@dataclass
class Meter:
    """The size that results may still have in total: elements, characters and 30-bit digits of integers."""

    left: int = 1_000_000

    def take(self, size: int) -> None:
        """Subtracts the size of a result. Raises `NotLiteral` if too little is left."""
        if size > self.left:
            raise NotLiteral(f"its value is too large: {size} parts, of {self.left} left")
        self.left -= size


def literal(node: ast.expr, meter: Meter) -> object:
    """Evaluates an expression of literals, such as `-1`, `10**9 + 7`, `set([1, 2])`, `float("inf")` or `math.pi`.

    Raises `NotLiteral` for other expressions, and for results larger than the meter allows.
    """
    match node:
        case ast.Constant(value=value) if value is not ...:
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set_of}[type(node)]
            return _applied(kind, [[literal(part, meter) for part in parts]])
        case ast.Dict(keys=keys, values=parts) if None not in keys:
            found = [literal(part, meter) for pair in zip(keys, parts, strict=True) for part in pair if part]
            return _applied(dict_of, [list(zip(found[::2], found[1::2], strict=True))])
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _CONSTANTS:
            return vars(math)[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            values = [literal(part, meter) for part in args]
            meter.take(_size_of_call(name, values))
            return _applied(_FUNCTIONS[name], values)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [literal(operand, meter)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            values = [literal(left, meter), literal(right, meter)]
            meter.take(_size_of_operation(op, *values))
            return _applied(_OPERATORS[type(op)], values)
    raise NotLiteral(ast.dump(node)[:100])


def decoded(encoded: object) -> object:
    """The value that parsed JSON encodes. Raises `ValueError` or `TypeError` if it does not encode one."""
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
        case [str(kind), *parts] if kind in _CONTAINERS:
            return _CONTAINERS[kind](map(decoded, parts))
    raise ValueError(f"not a value: {encoded!r:.100}")


def set_of(members: Iterable[Hashable] = ()) -> set:
    """A set. Raises `ValueError` if so many members have the same hash that building it would be slow."""
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


def _applied(function: Callable, values: list[object]) -> object:
    try:
        return function(*values)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise NotLiteral(str(error)) from error


def _size_of_operation(op: ast.operator, left: object, right: object) -> int:
    """An upper bound on the size of an operation's result and on its cost. Raises `NotLiteral` if none is known."""
    match op, left, right:
        case ast.Mod(), str() | bytes(), _:  # "%1000000000d" % 1
            raise NotLiteral("a formatted string")
        case ast.Pow(), int(), int():
            return _size(left) * (abs(right) + 1)
        case ast.LShift(), int(), int():
            return _size(left) + max(right, 0) // 30
        case (ast.Mult(), int(), int()) | (ast.FloorDiv() | ast.Mod() | ast.Div(), _, _):
            return 1 + _size(left) * _size(right)
        case ast.Mult(), int(), _:
            return max(left, 0) * _size(right)
        case ast.Mult(), _, int():
            return max(right, 0) * _size(left)
    return _size(left) + _size(right)


def _size_of_call(name: str, values: list[object]) -> int:
    """An upper bound on the size of a call's result."""
    match name, values:
        case "bytes", [int() as length]:
            return max(length, 0)
        case "round", [_, int() as digits]:
            return abs(digits)
        case (("range" | "bool" | "len"), _):
            return 1
        case "sum", [list() | tuple() | set() as parts, *_] if not all(
            isinstance(part, int | float | complex) for part in parts
        ):
            raise NotLiteral("a sum of values that are not numbers")
    return sum(map(_size, values))


def _size(value: object) -> int:
    """The size of a value; an object that occurs twice counts twice."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 30
    if isinstance(value, range):
        return max(0, (value.stop - value.start) // value.step)
    if isinstance(value, str | bytes):
        return 1 + len(value)
    if isinstance(value, dict):
        return 1 + sum(_size(key) + _size(each) for key, each in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return 1 + sum(map(_size, value))
    return 1


_CONTAINERS: Mapping[str, Callable] = {
    "list": list,
    "tuple": tuple,
    "set": set_of,
    "frozenset": frozenset_of,
    "dict": dict_of,
}
_FUNCTIONS: Mapping[str, Callable] = {
    each.__name__: each
    for each in (abs, bool, bytes, complex, float, int, len, max, min, range, round, sorted, str, sum)
} | _CONTAINERS
