"""Rules of docstrings, types and comments (docs/style.md, sections 3, 4, 9 and 11)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache

from tests.architecture.shape import every_argument
from tests.architecture.source import FunctionNode, SourceFile, Violation, bases, public_definitions, python_files

RECIPE_HEADER = ("question", "hardware", "minutes", "command", "expect")
DUNDERS_OF_CALLERS = ("__init__", "__call__")


def docstrings(source: SourceFile) -> Iterator[Violation]:
    """Every public module, class, function and method says what it is; a method of an interface says it there, once."""
    if not ast.get_docstring(source.tree) and not _is_private(source.path):
        yield Violation("docstring", source.path, "the module has no docstring")
    for name, node, owner in public_definitions(source.tree):
        if not _says_something(node) and not (owner and _is_in_a_base(owner, node.name)):
            yield Violation("docstring", f"{source.path}:{name}", "no docstring")


def annotations(source: SourceFile) -> Iterator[Violation]:
    """Every parameter and result of a public function or method has a type."""
    for name, node in _callables(source.tree):
        for argument in every_argument(node):
            if argument.annotation is None and argument.arg not in ("self", "cls"):
                yield Violation("annotation", f"{source.path}:{name}", f"parameter '{argument.arg}' has no type")
        if node.returns is None and node.name != "__init__":
            yield Violation("annotation", f"{source.path}:{name}", "the result has no type")


def no_any(source: SourceFile) -> Iterator[Violation]:
    """No public function takes or returns `Any`."""
    for name, node in _callables(source.tree):
        types = [argument.annotation for argument in every_argument(node)] + [node.returns]
        used = {inner.id for kind in types if kind for inner in ast.walk(kind) if isinstance(inner, ast.Name)}
        if "Any" in used:
            yield Violation("any", f"{source.path}:{name}", "Any in a public signature")


def no_probing(source: SourceFile) -> Iterator[Violation]:
    """No `hasattr`, and no `getattr` of a name written in the code: types say what an object has."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        literal = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
        if node.func.id == "hasattr" or (node.func.id == "getattr" and literal):
            yield Violation("probing", f"{source.path}:{ast.unparse(node)}", f"line {node.lineno}")


def no_future_annotations(source: SourceFile) -> Iterator[Violation]:
    """`from __future__ import annotations` turns jaxtyping's checks off."""
    modules = {node.module for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)}
    if {"__future__", "jaxtyping"} <= modules:
        yield Violation("future-annotations", source.path, "beside jaxtyping")


def comments(source: SourceFile) -> Iterator[Violation]:
    """Comments are ASCII, and a TODO names its issue."""
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        place = f"{source.path}:{token.start[0]}"
        if not token.string.isascii():
            yield Violation("comment", place, "not ASCII")
        if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", token.string):
            yield Violation("comment", place, "a TODO without an issue: write TODO(#123)")


def recipe_header(source: SourceFile) -> Iterator[Violation]:
    """A recipe's docstring gives question, hardware, minutes, command and the number to expect."""
    header = (ast.get_docstring(source.tree) or "").lower()
    missing = [word for word in RECIPE_HEADER if word not in header]
    if missing:
        yield Violation("recipe-header", source.path, f"missing: {', '.join(missing)}")


def _callables(tree: ast.Module) -> Iterator[tuple[str, FunctionNode]]:
    for name, node, _ in public_definitions(tree):
        if isinstance(node, FunctionNode):
            yield name, node
        else:
            for item in node.body:
                if isinstance(item, FunctionNode) and item.name in DUNDERS_OF_CALLERS:
                    yield f"{name}.{item.name}", item


def _says_something(node: ast.ClassDef | FunctionNode) -> bool:
    return bool((ast.get_docstring(node) or "").strip())


def _is_in_a_base(owner: ast.ClassDef, method: str) -> bool:
    """Whether an interface of the package, or a class this one inherits from, documents the method."""
    return method in _documented_methods().get("Protocol", ()) or any(
        method in _documented_methods().get(base, ()) for base in bases(owner)
    )


@cache
def _documented_methods() -> dict[str, set[str]]:
    """Documented methods by class name; those of all interfaces together under `Protocol`."""
    found: dict[str, set[str]] = {}
    for source in python_files():
        if source.path.startswith("hybridflow/"):
            for _, node, owner in public_definitions(source.tree):
                if owner is not None and _says_something(node):
                    for name in {owner.name} | (bases(owner) & {"Protocol"}):
                        found.setdefault(name, set()).add(node.name)
    return found


def _is_private(path: str) -> bool:
    name = path.rsplit("/", 1)[-1].removesuffix(".py")
    return name.startswith("_") and not name.startswith("__")
