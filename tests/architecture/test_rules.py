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

COUNTER_EXAMPLES: tuple[tuple[Rule, str, str, str], ...] = (
    (shape.file_length, "hybridflow/room/long.py", LONG_FILE, "hybridflow/room/long.py"),
    (shape.file_length, "hybridflow/trainer/main_x.py", "x = 1\n" * 60, "hybridflow/trainer/main_x.py"),
    (shape.file_length, "recipes/x.py", "x = 1\n" * 150, "recipes/x.py"),
    (shape.function_length, "hybridflow/a.py", LONG_FUNCTION, "hybridflow/a.py:f"),
    (shape.parameters, "hybridflow/a.py", "def f(a, b, c, d, *, e, g, h, i, j): ...", "hybridflow/a.py:f"),
    (shape.parameters, "hybridflow/a.py", "def f(a, b, c, d, e, g, h, *i, **j): ...", "hybridflow/a.py:f"),
    (shape.names_of_files, "hybridflow/utils/tensors.py", "", "hybridflow/utils/tensors.py"),
    (shape.names_of_files, "hybridflow/batch/batch_helpers.py", "", "hybridflow/batch/batch_helpers.py"),
    (shape.door_card, "hybridflow/room/__init__.py", "if True:\n    x = 1\n", "hybridflow/room/__init__.py"),
    (shape.no_print, "hybridflow/a.py", "print('x')", "hybridflow/a.py:1"),
    (shape.small_interfaces, "hybridflow/a.py", NINE_METHODS, "hybridflow/a.py:Engine"),
    (words.docstrings, "hybridflow/a.py", "x = 1", "hybridflow/a.py"),
    (words.docstrings, "hybridflow/a.py", '"""A."""\ndef f(): ...', "hybridflow/a.py:f"),
    (words.docstrings, "hybridflow/a.py", '"""A."""\nclass C: ...', "hybridflow/a.py:C"),
    (
        words.docstrings,
        "hybridflow/a.py",
        '"""A."""\nclass C:\n    """C."""\n    def m_(self): ...',
        "hybridflow/a.py:C.m_",
    ),
    (words.annotations, "hybridflow/a.py", "def f(x) -> None: ...", "hybridflow/a.py:f"),
    (words.annotations, "hybridflow/a.py", "def f(x: int): ...", "hybridflow/a.py:f"),
    (
        words.annotations,
        "hybridflow/a.py",
        "class C:\n    def __init__(self, x) -> None: ...",
        "hybridflow/a.py:C.__init__",
    ),
    (words.no_any, "hybridflow/a.py", "def f(x: dict[str, Any]) -> None: ...", "hybridflow/a.py:f"),
    (words.no_any, "hybridflow/a.py", "def f() -> Any: ...", "hybridflow/a.py:f"),
    (words.no_probing, "hybridflow/a.py", "hasattr(x, name)", "hybridflow/a.py:hasattr(x, name)"),
    (words.no_probing, "hybridflow/a.py", "getattr(x, 'a', None)", "hybridflow/a.py:getattr(x, 'a', None)"),
    (
        words.no_future_annotations,
        "hybridflow/a.py",
        "from __future__ import annotations\nfrom jaxtyping import Float",
        "hybridflow/a.py",
    ),
    (words.comments, "hybridflow/a.py", "x = 1  # \u2192 y", "hybridflow/a.py:1"),
    (words.comments, "hybridflow/a.py", "x = 1  # TODO later", "hybridflow/a.py:1"),
    (words.recipe_header, "recipes/x.py", '"""Question: does it learn?"""', "recipes/x.py"),
    (imports.imports_at_the_top, "hybridflow/room/a.py", INNER_IMPORT, "hybridflow/room/a.py:f"),
    (imports.no_mocks, "tests/unit/test_a.py", "from unittest.mock import patch", "tests/unit/test_a.py"),
    (imports.no_mocks, "tests/unit/test_a.py", "import unittest.mock", "tests/unit/test_a.py"),
    (untrusted.no_code_from_data, "hybridflow/a.py", "import pickle", "hybridflow/a.py:pickle"),
    (untrusted.no_code_from_data, "hybridflow/a.py", "from pickle import loads", "hybridflow/a.py:pickle"),
    (
        untrusted.no_code_from_data,
        "hybridflow/a.py",
        "from torch.distributed.checkpoint.state_dict_loader import load",
        "hybridflow/a.py:torch.distributed.checkpoint",
    ),
    (untrusted.no_code_from_data, "hybridflow/a.py", "torch.load('x')", "hybridflow/a.py:torch.load"),
    (untrusted.no_code_from_data, "hybridflow/a.py", "np.load('x', allow_pickle=True)", "hybridflow/a.py:np.load"),
    (
        untrusted.no_code_from_data,
        "hybridflow/a.py",
        "dist.all_gather_object(gathered, own)",
        "hybridflow/a.py:all_gather_object",
    ),
    (untrusted.no_code_from_data, "hybridflow/a.py", "receiver.recv()", "hybridflow/a.py:Connection.recv"),
    (imports.heavy_imports_by_name, "hybridflow/launch/a.py", "require('ray')", "hybridflow/launch/a.py:ray"),
    (
        imports.heavy_imports_by_name,
        "hybridflow/a.py",
        "importlib.import_module('vllm.config')",
        "hybridflow/a.py:vllm",
    ),
)

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


@pytest.mark.parametrize(("rule", "path", "text", "subject"), COUNTER_EXAMPLES)
def test_a_violation_is_seen(rule, path, text, subject):
    assert subject in [violation.subject for violation in rule(parsed(path, text))]


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
