"""Expressions whose value is known without running a program."""

import ast
import math
import operator
from collections.abc import Callable, Mapping

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
    for made in (
        abs,
        bool,
        bytes,
        complex,
        dict,
        float,
        frozenset,
        int,
        len,
        list,
        max,
        min,
        round,
        set,
        sorted,
        str,
        sum,
    )
} | {"tuple": tuple, "range": range}
_NUMBERS = ("e", "inf", "nan", "pi", "tau")


class NotLiteral(ValueError):
    """An expression that is no literal."""


def literal(node: ast.expr) -> object:
    """The value of an expression of literals: also `-1`, `10**9 + 7`, `set([1, 2])`, `float("inf")` and `math.pi`.

    Raises `NotLiteral` for all others.
    """
    match node:
        case ast.Constant(value=value) if value is not ...:
            return value
        case ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            return _made(node)
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _NUMBERS:
            return vars(math)[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _MAKERS:
            return _applied(_MAKERS[name], args)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [operand])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _applied(_OPERATORS[type(op)], [left, right])
    raise NotLiteral(ast.dump(node)[:100])


def _made(node: ast.List | ast.Tuple | ast.Set | ast.Dict) -> object:
    """A list, tuple, set or dict of literals."""
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise NotLiteral("a dict in a dict")
        return _applied(
            lambda *parts: dict(zip(parts[::2], parts[1::2], strict=True)),
            [part for pair in zip(node.keys, node.values, strict=True) for part in pair if part is not None],
        )
    kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
    return _applied(lambda *parts: kind(parts), node.elts)


def _applied(function: Callable, nodes: list[ast.expr]) -> object:
    values = [literal(node) for node in nodes]
    try:
        return function(*values)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise NotLiteral(str(error)) from error
