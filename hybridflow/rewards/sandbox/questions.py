"""Splits tests into expressions that the program's process evaluates, and conditions on their values, checked outside.

For `assert double(2) == 4`, the program's process evaluates `double(2)` and reports the value. The 4 stays here, so the
program cannot find it in its own process. A test that cannot be split runs there whole, and its verdict is trusted.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache

from hybridflow.rewards.sandbox.values import Meter, NotLiteral, decoded, literal

Answers = Sequence[object]
Check = Callable[[Answers], object]
"""Computes a value from the program's answers, outside its process."""

RUN, ASK = "run", "ask"
_KEPT = 100
"""Size of the largest value that is cached with its test. Larger ones are recomputed: thousands of tests are cached."""
_FAILED = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
_COMPARISONS: Mapping[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_DISTANCES: Mapping[type[ast.operator], Callable[..., object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
_MEASURES: Mapping[str, Callable[..., object]] = {"abs": abs, "math.fabs": math.fabs, "math.isclose": math.isclose}


@dataclass(frozen=True)
class Question:
    """A test. `steps` are statements to run and expressions to evaluate in the program's process.

    Without steps, `text` runs there as a whole. `is_isolated`: names that it sets are not visible to the program.
    """

    text: str
    steps: tuple[tuple[str, str], ...] = ()
    conditions: tuple[Check, ...] = ()
    is_isolated: bool = False

    @property
    def is_split(self) -> bool:
        """Whether the expected values stay out of the program's process."""
        return bool(self.steps)

    def is_passed(self, reply: bytes) -> bool:
        """Whether the reply of the program's process passes the test."""
        if not self.is_split:
            return reply == b"1"
        try:
            answers = json.loads(reply)
            if not isinstance(answers, list) or len(answers) != sum(kind == ASK for kind, _ in self.steps):
                return False
            return all(condition(answers) for condition in self.conditions)
        except _FAILED:
            return False


@lru_cache(maxsize=4096)
def question_of(test: str) -> Question:
    """A test, split if it consists of `assert`s that compare with literals, or of a `check(candidate)` with such."""
    splitter = _Splitter()
    try:
        for statement in ast.parse(test).body:
            splitter.add(statement)
    except (_Unsplittable, SyntaxError, ValueError, RecursionError, MemoryError):
        return Question(test)
    if not splitter.num_asked:
        return Question(test)
    return Question(test, tuple(splitter.steps), tuple(splitter.conditions), splitter.is_isolated)


class _Unsplittable(Exception):
    """The test cannot be split."""


class _Splitter:
    """Splits a test, statement by statement."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        self.conditions: list[Check] = []
        self.num_asked = 0
        self.is_isolated = False
        self._checks: dict[str, ast.FunctionDef] = {}
        self._meter = Meter()

    def add(self, statement: ast.stmt) -> None:
        """Adds a statement. Raises `_Unsplittable` if its comparison cannot be split."""
        match statement:
            case ast.Assert(test=test):
                self.conditions.append(self._condition(test))
            case ast.FunctionDef(name=name) if _is_check(statement):
                self._checks[name] = statement
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[ast.Name() as tested], keywords=[])) if (
                name in self._checks
            ):
                self._inline(self._checks[name], tested)
            case _ if _is_check(statement) or _names(statement) & set(self._checks):
                raise _Unsplittable
            case _:
                self.steps.append((RUN, ast.unparse(statement)))

    def _inline(self, check: ast.FunctionDef, tested: ast.Name) -> None:
        """Adds the statements of a `check(candidate)`, with the tested function in place of the candidate."""
        given = check.args
        if len(given.args) != 1 or given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
            raise _Unsplittable
        self.is_isolated = True
        replace = _Renamed(given.args[0].arg, tested.id)
        for statement in check.body:
            if not isinstance(statement, ast.Assert | ast.Assign | ast.Import | ast.ImportFrom | ast.Expr | ast.Pass):
                raise _Unsplittable
            self.add(replace.visit(deepcopy(statement)))

    def _condition(self, node: ast.expr) -> Check:
        """Whether an expression is true."""
        match node:
            case ast.BoolOp(op=op, values=values):
                parts, together = [self._condition(value) for value in values], all if isinstance(op, ast.And) else any
                return lambda answers: together(part(answers) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                condition = self._condition(operand)
                return lambda answers: not condition(answers)
            case ast.Compare():
                return self._comparison(node)
            case ast.Call() if _is_distance(node, self._meter) or _is_plain_call(node, self._meter):
                return self._value(node)
            case _ if _is_literal(node, self._meter):
                return self._value(node)
        raise _Unsplittable

    def _comparison(self, node: ast.Compare) -> Check:
        """Whether a chain of comparisons holds, in each of which one side is a literal."""
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            known = [side for side in (left, right) if _is_literal(side, self._meter)]
            is_identity = isinstance(op, ast.Is | ast.IsNot)
            if not known or (is_identity and not any(_is_singleton(side) for side in known)):
                raise _Unsplittable
        values = [self._value(side) for side in sides]
        compare = [_COMPARISONS[type(op)] for op in node.ops]

        def holds(answers: Answers) -> bool:
            found = [value(answers) for value in values]
            return all(op(left, right) for op, left, right in zip(compare, found, found[1:], strict=False))

        return holds

    def _value(self, node: ast.expr) -> Check:
        """A literal or a distance from one, computed here; anything else is asked."""
        if _is_literal(node, self._meter):
            left, known = self._meter.left, literal(node, self._meter)
            if left - self._meter.left > _KEPT:
                return lambda answers: literal(node, Meter())
            return lambda answers: known
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _DISTANCES and _is_number(
                left, right, meter=self._meter
            ):
                apply, first, second = _DISTANCES[type(op)], self._value(left), self._value(right)
                return lambda answers: apply(first(answers), second(answers))
            case ast.Call(func=func, args=args, keywords=named) if _is_distance(node, self._meter):
                measure, given = _MEASURES[ast.unparse(func)], [self._value(part) for part in args]
                settings = {part.arg: literal(part.value, self._meter) for part in named if part.arg}
                return lambda answers: measure(*(part(answers) for part in given), **settings)
        return self._ask(node)

    def _ask(self, node: ast.expr) -> Check:
        self.steps.append((ASK, ast.unparse(node)))
        place = self.num_asked
        self.num_asked += 1
        return lambda answers: decoded(answers[place])


class _Renamed(ast.NodeTransformer):
    """Replaces a name by another."""

    def __init__(self, name: str, other: str) -> None:
        self._name, self._other = name, other

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Replaces the name."""
        return ast.Name(self._other, node.ctx) if node.id == self._name else node


def _is_check(node: ast.AST) -> bool:
    """Whether a statement appears to check the program, by raising an error if it is wrong."""
    return any(
        isinstance(part, ast.Assert | ast.Raise | ast.Try | ast.With)
        or (isinstance(part, ast.Name) and part.id.startswith("assert"))
        or (isinstance(part, ast.Attribute) and part.attr.startswith("assert"))
        for part in ast.walk(node)
    )


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _is_literal(node: ast.expr, meter: Meter) -> bool:
    try:
        literal(node, meter)
    except NotLiteral:
        return False
    return True


def _is_singleton(node: ast.expr) -> bool:
    """Whether its value is a singleton, so that `is` can be checked outside."""
    return isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool))


def _is_number(*nodes: ast.expr, meter: Meter) -> bool:
    """Whether one of them is a literal number, so that sums and differences stay small."""
    return any(_is_literal(node, meter) and isinstance(literal(node, meter), int | float | complex) for node in nodes)


def _is_distance(node: ast.Call, meter: Meter) -> bool:
    """Whether a call measures a distance from a literal: `abs(f(1) - 3.14)`, `math.isclose(f(1), 3.14)`."""
    name, parts = ast.unparse(node.func), node.args
    if name not in _MEASURES or any(isinstance(part, ast.Starred) for part in parts):
        return False
    if not all(part.arg and _is_literal(part.value, meter) for part in node.keywords):
        return False
    return name != "math.isclose" or _is_number(*parts, meter=meter)


def _is_plain_call(node: ast.expr, meter: Meter) -> bool:
    """Whether a call of the program with literals, `f(7)` or `Stack().is_empty()`, which reveals no expected value."""
    match node:
        case ast.Call(func=ast.Name(), args=args, keywords=named):
            return all(_is_literal(part, meter) for part in [*args, *(each.value for each in named)])
        case ast.Call(func=ast.Attribute(value=ast.Name() as module), args=args, keywords=named):
            return _is_plain_call(ast.Call(module, args, named), meter)
        case ast.Call(func=ast.Attribute(value=ast.Call(args=[], keywords=[]) as made), args=args, keywords=named):
            return _is_plain_call(made, meter) and _is_plain_call(ast.Call(ast.Name("made"), args, named), meter)
        case ast.Call(func=ast.Attribute(value=ast.Call() as made), args=[], keywords=[]):
            return _is_plain_call(made, meter)
    return False
