"""The schema stays small enough to know: few fields, shallow keys, and a docstring under every field."""

import ast
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from hybridflow.config.experiment import Experiment
from tests.architecture.source import SourceFile, Violation, parsed, python_files

MOST_FIELDS = 257
MOST_LEVELS = 4


def sections(kind: object) -> Iterator[tuple[type, int]]:
    """The dataclasses inside a type with the levels of keys that lead to them: a mapping adds one for its names."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind, 0
    names = 1 if typing.get_origin(kind) is dict else 0
    for argument in typing.get_args(kind):
        yield from ((section, levels + names) for section, levels in sections(argument))


def key_levels(root: type, above: int = 0) -> Iterator[tuple[type, int]]:
    """Every section under the root, with the number of parts of its longest own key (`trainer.seed` has 2)."""
    yield root, above + 1
    for kind in typing.get_type_hints(root).values():
        for section, levels in sections(kind):
            yield from key_levels(section, above + 1 + levels)


def num_fields(root: type) -> int:
    """Fields of the schema, shared sections counted once."""
    return sum(len(dataclasses.fields(section)) for section in {section for section, _ in key_levels(root)})


def undocumented_fields(source: SourceFile, schema: set[str]) -> Iterator[Violation]:
    """Fields of the schema's dataclasses that are not followed by a docstring."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and node.name in schema:
            for item, below in zip(node.body, [*node.body[1:], None], strict=True):
                says = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if isinstance(item, ast.AnnAssign) and not says:
                    yield Violation("field", f"{source.path}:{node.name}.{ast.unparse(item.target)}", "no docstring")


def test_the_schema_has_few_fields():
    assert num_fields(Experiment) <= MOST_FIELDS


def test_keys_are_shallow():
    deep = {section.__name__: levels for section, levels in key_levels(Experiment) if levels > MOST_LEVELS}
    assert not deep


def test_every_field_says_what_it_is():
    config = [source for source in python_files() if source.path.startswith("hybridflow/config/")]
    schema = {section.__name__ for section, _ in key_levels(Experiment)}
    assert len(schema) > 5
    found = [violation for source in config for violation in undocumented_fields(source, schema)]
    assert not found, "\n".join(violation.subject for violation in found)


@dataclass
class Leaf:
    value: int = 0
    other: int = 0


@dataclass
class Branch:
    leaves: dict[str, Leaf] = field(default_factory=dict)
    leaf: Leaf | None = None


def test_fields_are_counted_once_and_names_of_a_mapping_are_a_level():
    assert num_fields(Branch) == 4
    assert max(levels for section, levels in key_levels(Branch) if section is Leaf) == 3
    assert min(levels for section, levels in key_levels(Branch) if section is Leaf) == 2


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('    a: int = 0\n    """An a."""\n', []),
        ('    a: int = 0\n    b: int = 0\n    """A b."""\n', ["x.py:C.a"]),
        ('    a: int = 0\n    """An a."""\n    b: int = 0\n', ["x.py:C.b"]),
    ],
)
def test_a_field_without_docstring_is_seen(body, expected):
    text = f"@dataclass\nclass C:\n{body}"
    assert [violation.subject for violation in undocumented_fields(parsed("x.py", text), {"C"})] == expected
