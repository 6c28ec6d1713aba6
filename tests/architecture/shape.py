"""Rules of size and shape (docs/style.md, sections 1 and 5)."""

import ast
from collections.abc import Iterator

from tests.architecture.source import FunctionNode, SourceFile, Violation, bases, functions

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 8
MOST_METHODS_OF_AN_INTERFACE = 8
MOST_LINES_OF_AN_ENTRY_POINT = 59
MOST_LINES_OF_A_RECIPE = 149
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base", "manager", "managers"}
INITS_WITH_LOGIC = {"hybridflow/controller/backends/__init__.py"}


def file_length(source: SourceFile) -> Iterator[Violation]:
    """A file has at most 400 lines; an entry point fewer than 60, a recipe fewer than 150."""
    most = MOST_LINES_OF_A_FILE
    if source.path.startswith("hybridflow/trainer/main_"):
        most = MOST_LINES_OF_AN_ENTRY_POINT
    elif source.path.startswith("recipes/"):
        most = MOST_LINES_OF_A_RECIPE
    lines = len(source.text.splitlines())
    if lines > most:
        yield Violation("file-length", source.path, f"{lines} lines, at most {most}")


def function_length(source: SourceFile) -> Iterator[Violation]:
    """A function has at most 60 lines, its docstring included."""
    for node in functions(source.tree):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MOST_LINES_OF_A_FUNCTION:
            yield Violation("function-length", f"{source.path}:{node.name}", f"{lines} lines")


def parameters(source: SourceFile) -> Iterator[Violation]:
    """A function has at most 8 parameters, `self` and `cls` not counted."""
    for node in functions(source.tree):
        names = [argument.arg for argument in every_argument(node)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MOST_PARAMETERS:
            yield Violation("parameters", f"{source.path}:{node.name}", f"{count} parameters")


def names_of_files(source: SourceFile) -> Iterator[Violation]:
    """No file or package is called utils, helpers, common, misc, base or manager, not even in part."""
    for part in source.path.removesuffix(".py").split("/"):
        if BANNED_NAMES & set(part.lower().split("_")):
            yield Violation("file-name", source.path, f"'{part}' says nothing about its concept")


def door_card(source: SourceFile) -> Iterator[Violation]:
    """A package's `__init__.py` holds a docstring, imports and names, and no logic."""
    if not source.path.endswith("/__init__.py") or source.path in INITS_WITH_LOGIC:
        return
    for node in source.tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__")
        if not (is_docstring or is_dunder or isinstance(node, ast.Import | ast.ImportFrom)):
            yield Violation("door-card", source.path, f"logic at line {node.lineno}")


def no_print(source: SourceFile) -> Iterator[Violation]:
    """Nothing prints: what leaves the system goes through logging and trackers."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint"):
            yield Violation("print", f"{source.path}:{node.lineno}", ast.unparse(node)[:60])


def small_interfaces(source: SourceFile) -> Iterator[Violation]:
    """A Protocol has at most 8 methods."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and "Protocol" in bases(node):
            methods = sum(isinstance(item, FunctionNode) for item in node.body)
            if methods > MOST_METHODS_OF_AN_INTERFACE:
                yield Violation("interface-size", f"{source.path}:{node.name}", f"{methods} methods")


def every_argument(node: FunctionNode) -> list[ast.arg]:
    """All parameters of a function, `*args` and `**kwargs` included."""
    arguments = node.args
    starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *starred]
