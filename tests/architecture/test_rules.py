"""Each rule of the house, on the real tree; and on counter-examples, so that a rule that sees nothing is noticed."""

import pytest

from tests.architecture import imports, shape, untrusted, words
from tests.architecture.source import ROOT, Rule, parsed, python_files

PACKAGE = ("hybridflow/",)
PROGRAMS = ("hybridflow/", "recipes/", "benchmarks/")
EVERYTHING = ("hybridflow/", "recipes/", "benchmarks/", "tests/", "docs/")

RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (shape.file_length, EVERYTHING),
    (shape.function_length, EVERYTHING),
    (shape.parameters, EVERYTHING),
    (shape.names_of_files, EVERYTHING),
    (shape.door_card, PACKAGE),
    (shape.no_print, PACKAGE),
    (shape.small_interfaces, PACKAGE),
    (words.docstrings, PROGRAMS),
    (words.annotations, PACKAGE),
    (words.no_any, PACKAGE),
    (words.no_probing, PACKAGE),
    (words.no_future_annotations, EVERYTHING),
    (words.comments, EVERYTHING),
    (words.recipe_header, ("recipes/",)),
    (imports.imports_at_the_top, PACKAGE),
    (imports.heavy_imports_by_name, PACKAGE),
    (imports.no_mocks, ("tests/",)),
    (untrusted.no_code_from_data, PACKAGE),
)

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
LONG_FILE = "x = 1\n" * 401
NINE_METHODS = "class Engine(Protocol):\n" + "".join(f"    def m{i}(self) -> None: ...\n" for i in range(9))
INNER_IMPORT = "def f() -> None:\n    import json\n"

A = "hybridflow/a.py"
COUNTER_EXAMPLES: tuple[tuple[Rule, str, str, str], ...] = (
    (shape.file_length, "hybridflow/room/long.py", LONG_FILE, ""),
    (shape.file_length, "hybridflow/trainer/main_x.py", "x = 1\n" * 60, ""),
    (shape.file_length, "recipes/x.py", "x = 1\n" * 150, ""),
    (shape.function_length, A, LONG_FUNCTION, ":f"),
    (shape.parameters, A, "def f(a, b, c, d, *, e, g, h, i, j): ...", ":f"),
    (shape.parameters, A, "def f(a, b, c, d, e, g, h, *i, **j): ...", ":f"),
    (shape.names_of_files, "hybridflow/utils/tensors.py", "", ""),
    (shape.names_of_files, "hybridflow/batch/batch_helpers.py", "", ""),
    (shape.door_card, "hybridflow/room/__init__.py", "if True:\n    x = 1\n", ""),
    (shape.no_print, A, "print('x')", ":1"),
    (shape.small_interfaces, A, NINE_METHODS, ":Engine"),
    (words.docstrings, A, "x = 1", ""),
    (words.docstrings, A, '"""A."""\ndef f(): ...', ":f"),
    (words.docstrings, A, '"""A."""\nclass C: ...', ":C"),
    (words.docstrings, A, '"""A."""\nclass C:\n    """C."""\n    def m_(self): ...', ":C.m_"),
    (words.annotations, A, "def f(x) -> None: ...", ":f"),
    (words.annotations, A, "def f(x: int): ...", ":f"),
    (words.annotations, A, "class C:\n    def __init__(self, x) -> None: ...", ":C.__init__"),
    (words.no_any, A, "def f(x: dict[str, Any]) -> None: ...", ":f"),
    (words.no_any, A, "def f() -> Any: ...", ":f"),
    (words.no_probing, A, "hasattr(x, name)", ":hasattr(x, name)"),
    (words.no_probing, A, "getattr(x, 'a', None)", ":getattr(x, 'a', None)"),
    (words.no_future_annotations, A, "from __future__ import annotations\nfrom jaxtyping import Float", ""),
    (words.comments, A, "x = 1  # \u2192 y", ":1"),
    (words.comments, A, "x = 1  # TODO later", ":1"),
    (words.recipe_header, "recipes/x.py", '"""Question: does it learn?"""', ""),
    (imports.imports_at_the_top, "hybridflow/room/a.py", INNER_IMPORT, ":f"),
    (imports.no_mocks, "tests/unit/test_a.py", "from unittest.mock import patch", ""),
    (imports.no_mocks, "tests/unit/test_a.py", "import unittest.mock", ""),
    (untrusted.no_code_from_data, A, "import pickle", ":pickle"),
    (untrusted.no_code_from_data, A, "from pickle import loads", ":pickle"),
    (
        untrusted.no_code_from_data,
        A,
        "from torch.distributed.checkpoint.state_dict_loader import load",
        ":torch.distributed.checkpoint",
    ),
    (untrusted.no_code_from_data, A, "torch.load('x')", ":torch.load"),
    (untrusted.no_code_from_data, A, "np.load('x', allow_pickle=True)", ":np.load"),
    (untrusted.no_code_from_data, A, "dist.all_gather_object(gathered, own)", ":all_gather_object"),
    (untrusted.no_code_from_data, A, "receiver.recv()", ":Connection.recv"),
    (imports.heavy_imports_by_name, "hybridflow/launch/a.py", "require('ray')", ":ray"),
    (imports.heavy_imports_by_name, A, "importlib.import_module('vllm.config')", ":vllm"),
)
"""A rule, a file's path and text, and what the subject of its violation adds to the path."""

FINE = '''"""A file that keeps every rule."""

from collections.abc import Iterator


class Counter:
    """Counts."""

    def __init__(self, start: int) -> None:
        self.value = start

    def upwards(self, *, by: int) -> Iterator[int]:
        """The next values."""
        self.value += by  # TODO(#7): a limit
        yield getattr(self, _name())


def _name():
    return "value"
'''


@pytest.mark.parametrize(("rule", "folders"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_project_keeps(rule, folders):
    files = [source for source in python_files() if source.path.startswith(folders)]
    listing = "\n".join(f"  {violation.subject}: {violation.found}" for file in files for violation in rule(file))
    assert not listing, f"{rule.__doc__}\n{listing}"


@pytest.mark.parametrize(("rule", "path", "text", "place"), COUNTER_EXAMPLES)
def test_a_violation_is_seen(rule, path, text, place):
    assert path + place in [violation.subject for violation in rule(parsed(path, text))]


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES if rule is not words.recipe_header])
def test_a_file_that_keeps_every_rule_passes(rule):
    assert not list(rule(parsed("hybridflow/room/counter.py", FINE)))


def test_every_rule_has_a_counter_example():
    assert {rule for rule, _ in RULES} == {rule for rule, *_ in COUNTER_EXAMPLES}


@pytest.mark.parametrize(
    "path", ["hybridflow/rewards/factory.py", "hybridflow/launch/command.py", "hybridflow/cli/show.py"]
)
def test_the_closed_list_may_import_inside_functions(path):
    assert not list(imports.imports_at_the_top(parsed(path, INNER_IMPORT)))


def test_the_closed_list_of_inner_imports_agrees_with_ruffs():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for pattern in imports.MAY_IMPORT_INSIDE_FUNCTIONS:
        assert pattern.replace("hybridflow/*/", "**/").replace("cli/*", "cli/**") in pyproject
