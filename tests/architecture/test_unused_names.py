"""Every public name of the package is used outside the tests: by the package, benchmarks, recipes or documents."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.architecture.source import ROOT, SourceFile, parsed, public_definitions, python_files, tracked_files

USERS = ("hybridflow/", "benchmarks/", "recipes/", "docs/")
CALLED_BY_LIBRARIES = {
    "num_keys",  # torch.distributed, on stores
    "process_weights_after_loading",  # vLLM, on layers
    "render",  # rich, on consoles
}
CODE_IN_TEXT = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


class Reads:
    """The names that one file reads, with their lines, and the strings in it that could name something."""

    def __init__(self, source: SourceFile) -> None:
        self.names: list[tuple[str, int]] = []
        self.attributes: list[tuple[str, int]] = []
        self.imported: set[str] = set()
        self.words: set[str] = set()
        original: dict[str, str] = {}
        members: list[tuple[str, str]] = []
        docstrings: set[int] = set()
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                original |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.names.append((node.id, node.lineno))
            elif isinstance(node, ast.Attribute):
                self.attributes.append((node.attr, node.lineno))
                if isinstance(node.value, ast.Name):
                    members.append((node.value.id, node.attr))
            elif isinstance(node, ast.Expr):
                docstrings.add(id(node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                if not re.search(r"\s", node.value):
                    self.words |= set(re.findall(r"\w+", node.value))
        self.imported |= {original[name] for name, _ in self.names if name in original}
        self.imported |= {attribute for module, attribute in members if module in original}


def unused_names(sources: Sequence[SourceFile], texts: Sequence[str] = ()) -> set[str]:
    """The public functions, classes, methods and constants of hybridflow/ that no source and no text uses.

    A name counts as used if it is read outside its own definition, or occurs in a string without spaces (a quoted
    annotation, a setting that names a function) or in code within a text. What an `__init__.py` re-exports does not
    count.
    """
    reads = {source.path: Reads(source) for source in sources if not source.path.endswith("/__init__.py")}
    known = {word for text in texts for code in CODE_IN_TEXT.findall(text) for word in re.findall(r"\w+", code)}
    known |= CALLED_BY_LIBRARIES.union(*(own.words for own in reads.values()))
    imported: set[str] = set().union(*(own.imported for own in reads.values()))
    attributes = Counter(name for own in reads.values() for name, _ in own.attributes)
    found = set()
    for source in sources:
        if source.path not in reads or not source.path.startswith("hybridflow/"):
            continue
        own = reads[source.path]
        for name, node, is_member in definitions(source.tree):
            last, lines = name.split(".")[-1], range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if last in known or (not is_member and last in imported):
                continue
            if is_member:
                inside = [line for attribute, line in own.attributes if attribute == last and line in lines]
                is_used = attributes[last] > len(inside)
            else:
                is_used = any(read == last and line not in lines for read, line in own.names)
            if not is_used:
                found.add(f"{source.path}:{name}")
    return found


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Public functions, classes, methods and constants, and whether each is a member of a class."""
    for name, node, owner in public_definitions(tree):
        yield name, node, owner is not None
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not target.id.startswith("_"):
                    yield target.id, node, False


def test_every_public_name_is_used_outside_the_tests():
    sources = [source for source in python_files() if source.path.startswith(USERS)]
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in tracked_files() if path.endswith(".md")]
    unused = unused_names(sources, texts)
    assert not unused, "Delete them, or use them:\n" + "\n".join(sorted(unused))


DEFINITIONS = """
LIMIT = 3

def area(side): return area(side - 1)

class Square:
    def scale(self): return self.scale()
"""


@pytest.mark.parametrize(
    ("users", "texts", "unused"),
    [
        ([], [], {"LIMIT", "area", "Square", "Square.scale"}),
        (["from hybridflow.a import LIMIT, Square\nSquare(LIMIT).scale()"], [], {"area"}),
        (["from hybridflow import a\na.area(a.LIMIT)"], [], {"Square", "Square.scale"}),
        (["from hybridflow.a import area"], [], {"LIMIT", "area", "Square", "Square.scale"}),
        (["area = LIMIT = 1\nprint(area, LIMIT)"], [], {"LIMIT", "area", "Square", "Square.scale"}),
        (["_x: 'Square' = print('hybridflow.a:area')"], ["`LIMIT`, and scale"], {"Square.scale"}),
    ],
)
def test_an_unused_name_is_found(users, texts, unused):
    sources = [parsed("hybridflow/a.py", DEFINITIONS), *(parsed("hybridflow/b.py", text) for text in users)]
    assert unused_names(sources, texts) == {f"hybridflow/a.py:{name}" for name in unused}


def test_an_import_into_a_package_alone_is_no_use():
    door = "from hybridflow.a import LIMIT, Square, area\n__all__ = ['LIMIT', 'Square', 'area']"
    sources = [parsed("hybridflow/a.py", DEFINITIONS), parsed("hybridflow/__init__.py", door)]
    assert "hybridflow/a.py:area" in unused_names(sources)


def test_every_name_called_by_libraries_is_still_defined():
    defined = {
        name.split(".")[-1]
        for source in python_files()
        if source.path.startswith("hybridflow/")
        for name, _, is_member in definitions(source.tree)
        if is_member
    }
    assert defined >= CALLED_BY_LIBRARIES
