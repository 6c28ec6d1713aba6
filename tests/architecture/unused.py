"""Public names that only tests use."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from tests.architecture.source import SourceFile, Violation, public_definitions

IMPORTED_BY_LIBRARIES = {"emit", "forward", "backward", "setup_context", "find_spec", "get_data", "source_to_code"}
"""Methods that Python or torch calls on our subclasses."""

_CODE_IN_TEXT = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_DOTTED = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Uses:
    """The names that a file uses."""

    source: SourceFile

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name of each name that the file imports, and its name where it is defined."""
        nodes = (node for node in ast.walk(self.source.tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return {alias.asname or alias.name: alias.name for node in nodes for alias in node.names}

    @cached_property
    def names(self) -> Counter[str]:
        """Bare names read in the file."""
        return Counter(_names(self.source.tree))

    @cached_property
    def attributes(self) -> Counter[str]:
        """Attributes read in the file."""
        return Counter(_attributes(self.source.tree))

    @cached_property
    def words(self) -> set[str]:
        """Names in strings that are not docstrings: annotations in quotes, functions named in settings."""
        return {word for text in _strings(self.source.tree) for word in re.findall(r"\w+", text)}

    @cached_property
    def from_elsewhere(self) -> set[str]:
        """Imported names, as defined, that the file reads."""
        members = {
            node.attr
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self.imported
        }
        return {name for local, name in self.imported.items() if self.names[local]} | members


def unused_names(sources: Iterable[SourceFile], texts: Iterable[str]) -> Iterator[Violation]:
    """Every public function, class, method or constant of the package is used outside the tests.

    `sources` are the Python files that count as users, `texts` documents and configurations.
    """
    uses = [Uses(source) for source in sources]
    written = {word for text in texts for code in _CODE_IN_TEXT.findall(text) for word in re.findall(r"\w+", code)}
    written |= {word for use in uses for word in use.words}
    elsewhere = {name for use in uses for name in use.from_elsewhere if not use.source.path.endswith("/__init__.py")}
    attributes: Counter[str] = Counter()
    for use in uses:
        attributes += use.attributes
    for use in uses:
        if not use.source.path.startswith("hybridflow/"):
            continue
        for name, node, owner in [*public_definitions(use.source.tree), *_constants(use.source.tree)]:
            last = name.split(".")[-1]
            if last in written:
                continue
            if owner is None:
                is_used = last in elsewhere or use.names[last] > Counter(_names(node))[last]
            else:
                own = Counter(_attributes(node))[last]
                is_used = attributes[last] > own or last in IMPORTED_BY_LIBRARIES
            if not is_used:
                yield Violation("unused-name", f"{use.source.path}:{name}", "nothing but tests uses it")


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, None]]:
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                yield target.id, node, None


def _names(tree: ast.AST) -> Iterator[str]:
    return (n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def _attributes(tree: ast.AST) -> Iterator[str]:
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _strings(tree: ast.AST) -> Iterator[str]:
    """Strings that could be code: a single dotted or quoted name, not prose; docstrings are left out."""
    docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            if len(node.value) < 80 and " " not in node.value:
                yield node.value
