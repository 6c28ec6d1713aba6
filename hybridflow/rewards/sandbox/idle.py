"""Detects tests that every program passes, such as `pass`, `x = 1` and `assert True`."""

import ast
import builtins
from functools import lru_cache

LONGEST_TEST = 1_000_000
"""Longest test in characters; the trainer's process parses every test."""

_REACHING = {"exec", "eval", "globals", "locals", "vars", "getattr", "__import__"}
"""Built-in functions through which a test may reach the program's names without naming them."""

_BUILT_IN = set(dir(builtins)) - _REACHING


@lru_cache(maxsize=4096)
def is_program(test: str) -> bool:
    """Whether a text is a program rather than an answer such as `42`, `3/4` or `Paris`."""
    body = _body(test)
    is_call = (isinstance(part, ast.Call) for node in body for part in ast.walk(node))
    return any(not isinstance(node, ast.Expr) for node in body) or any(is_call)


@lru_cache(maxsize=4096)
def can_fail(test: str) -> bool:
    """Whether a test can fail: it asserts, raises or calls something, and uses a name that it does not define.

    A comparison by itself (`f(1) == 2`) cannot fail, since its result is not used.
    """
    doing = [node for node in _body(test) if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call)]
    parts = [part for node in doing for part in ast.walk(node)]
    if not any(isinstance(part, ast.Assert | ast.Raise | ast.Call) for part in parts):
        return False
    used = {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    return bool(used - _made(parts) - _BUILT_IN)


def _made(parts: list[ast.AST]) -> set[str]:
    """Names that a test defines itself; imports from `program` belong to the program."""
    made: set[str] = set()
    for part in parts:
        match part:
            case ast.Import(names=names):
                made |= {(name.asname or name.name).partition(".")[0] for name in names if name.name != "program"}
            case ast.ImportFrom(module=module, names=names) if module != "program":
                made |= {name.asname or name.name for name in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                made.add(name)
    return made


def _body(test: str) -> list[ast.stmt]:
    if len(test) > LONGEST_TEST:
        return []
    try:
        return ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
