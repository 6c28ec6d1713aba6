"""The project's own files, parsed: what every rule of this folder reads."""

import ast
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("hybridflow", "tests", "benchmarks", "recipes", "docs")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """A Python file: its path from the root with forward slashes, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


@dataclass(frozen=True)
class Violation:
    """One place that breaks a rule."""

    rule: str
    subject: str
    found: str


Rule = Callable[[SourceFile], Iterator[Violation]]


def parsed(path: str, text: str) -> SourceFile:
    """A source file from its text; counter-examples in tests are made with it."""
    return SourceFile(path, text, ast.parse(text, filename=path))


@cache
def tracked_files() -> tuple[str, ...]:
    """Every file git tracks or would track, as paths from the root; outside a checkout, all of the code folders."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        return tuple(sorted(path for path in listing.stdout.split("\0") if path and (ROOT / path).is_file()))
    found = (path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts))


@cache
def python_files() -> tuple[SourceFile, ...]:
    """Every Python file of the project, parsed."""
    paths = [path for path in tracked_files() if path.endswith(".py") and path.split("/")[0] in CODE_FOLDERS]
    return tuple(parsed(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths)


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    """Every function and method, nested ones included."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef | FunctionNode, ast.ClassDef | None]]:
    """Public functions, classes and methods as (qualified name, node, class it belongs to); overloads are left out."""
    for name, node in _public(tree.body):
        yield name, node, None
        if isinstance(node, ast.ClassDef):
            for method, inner in _public(node.body):
                yield f"{name}.{method}", inner, node


def bases(node: ast.ClassDef) -> set[str]:
    """The last part of each base class's name: `Protocol` for `typing.Protocol` and `Protocol[T]`."""
    return {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}


def _public(body: list[ast.stmt]) -> Iterator[tuple[str, ast.ClassDef | FunctionNode]]:
    for node in body:
        if isinstance(node, ast.ClassDef | FunctionNode) and not node.name.startswith("_"):
            if not any(ast.unparse(decorator).endswith("overload") for decorator in node.decorator_list):
                yield node.name, node
