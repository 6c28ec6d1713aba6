"""The arithmetic of a shell: `$((1024 * n))` and `((n++))`."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_SET = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")


def computed(text: str, values: Mapping[str, str | list[str]]) -> str | None:
    """The value of an expression of whole numbers and variables; None for any other text."""
    named = _NAME.sub(lambda name: f"({values.get(name[1]) or 0})", text)
    try:
        return str(_value(ast.parse(named.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def names_set(text: str) -> list[str]:
    """The variables that an expression sets, as in `n++` and `n += 1`."""
    return [name or other for name, other in _SET.findall(text)]


def _quotient(number: int, by: int) -> int:
    """Rounded towards zero, as in C."""
    return abs(number) // abs(by) * (1 if (number < 0) == (by < 0) else -1)


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda number, by: number - by * _quotient(number, by),
}


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError
