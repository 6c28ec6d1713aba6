"""Evaluates expressions of literals, without running a program and within limits.

They come from data files and are evaluated in the trainer's own process, so the size of a result that a few characters
could make large (`10**10**8`, `list(range(10**9))`, `"a" * 10**9`) is computed before the result.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hybridflow.rewards.sandbox.values import dict_of, frozenset_of, set_of

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
_MAKERS: Mapping[str, Callable] = {
    made.__name__: made
    for made in (abs, bool, bytes, complex, float, int, len, list, max, min, round, sorted, str, sum)
} | {
    "tuple": tuple,
    "range": range,
    "set": set_of,
    "frozenset": frozenset_of,
    "dict": dict_of,
}
_NUMBER = int | float | complex
_NUMBERS = ("e", "inf", "nan", "pi", "tau")


class NotLiteral(ValueError):
    """An expression that is not a literal, or whose value is too large."""


@dataclass
class Meter:
    """The budget of operators and calls: elements, characters and 30-bit digits of integers that they may create."""

    left: int = 1_000_000

    def take(self, size: int) -> None:
        """Consumes part of the limit. Raises `NotLiteral` if too little is left."""
        if size > self.left:
            raise NotLiteral(f"its value is too large: {size} parts, of {self.left} left")
        self.left -= size


def literal(node: ast.expr, meter: Meter) -> object:
    """The value of an expression of literals: also `-1`, `10**9 + 7`, `set([1, 2])`, `float("inf")` and `math.pi`.

    Raises `NotLiteral` for other expressions, and for values larger than the meter has left.
    """
    match node:
        case ast.Constant(value=value) if value is not ...:
            return value
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            return _container(node, meter)
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _NUMBERS:
            return vars(math)[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _MAKERS:
            values = [literal(part, meter) for part in args]
            meter.take(_size_of_call(name, values))
            return _applied(_MAKERS[name], values)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [literal(operand, meter)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            values = [literal(left, meter), literal(right, meter)]
            meter.take(_size_of_operation(op, *values))
            return _applied(_OPERATORS[type(op)], values)
    raise NotLiteral(ast.dump(node)[:100])


def _container(node: ast.List | ast.Tuple | ast.Set | ast.Dict, meter: Meter) -> object:
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise NotLiteral("a dict unpacked in a dict")
        parts = [part for pair in zip(node.keys, node.values, strict=True) for part in pair if part is not None]
        values = [literal(part, meter) for part in parts]
        return _applied(dict_of, [list(zip(values[::2], values[1::2], strict=True))])
    kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set_of}[type(node)]
    return _applied(kind, [[literal(part, meter) for part in node.elts]])


def _applied(function: Callable, values: list[object]) -> object:
    try:
        return function(*values)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise NotLiteral(str(error)) from error


def _size_of_operation(op: ast.operator, left: object, right: object) -> int:
    """An upper bound of the size of an operation's result and of its cost. Raises `NotLiteral` if none is known."""
    match op, left, right:
        case ast.Mod(), str() | bytes(), _:  # "%1000000000d" % 1
            raise NotLiteral("a formatted text")
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
    """An upper bound of the size of a call's result."""
    match name, values:
        case "bytes", [int() as length]:
            return max(length, 0)
        case "round", [_, int() as digits]:
            return abs(digits)
        case (("range" | "bool" | "len"), _):
            return 1
        case "sum", [list() | tuple() | set() as parts, *_] if not all(isinstance(part, _NUMBER) for part in parts):
            raise NotLiteral("a sum of other things than numbers")
    return sum(map(_size, values))


def _size(value: object) -> int:
    """The size of a value; elements that occur twice count twice."""
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
