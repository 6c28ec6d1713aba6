"""Rules of imports that import-linter cannot state: where they stand, and those made by name (docs/house.md)."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

from tests.architecture.source import FunctionNode, SourceFile, Violation

MAY_IMPORT_INSIDE_FUNCTIONS = (
    "hybridflow/*/factory.py",
    "hybridflow/controller/backends/__init__.py",
    "hybridflow/launch/command.py",
    "hybridflow/cli/*",
    "hybridflow/doctor/checks/*",
)
ROOM_OF_HEAVY = {
    "ray": "hybridflow/controller/backends/ray/*",
    "vllm": "hybridflow/engines/rollout/vllm/*",
    "megatron": "hybridflow/engines/training/megatron/*",
    "hydra": "hybridflow/config/schema.py",
    "wandb": "hybridflow/observability/trackers/wandb.py",
    "mlflow": "hybridflow/observability/trackers/mlflow.py",
}


def imports_at_the_top(source: SourceFile) -> Iterator[Violation]:
    """Imports stand at the top of the file, but for a closed list of files that choose between implementations."""
    if any(fnmatch(source.path, pattern) for pattern in MAY_IMPORT_INSIDE_FUNCTIONS):
        return
    for function in ast.walk(source.tree):
        if isinstance(function, FunctionNode):
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield Violation("inner-import", f"{source.path}:{function.name}", ast.unparse(node))


def no_mocks(source: SourceFile) -> Iterator[Violation]:
    """Tests run the real thing: no mocks."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and "mock" in ast.unparse(node):
            yield Violation("mock", source.path, ast.unparse(node))


def heavy_imports_by_name(source: SourceFile) -> Iterator[Violation]:
    """A heavy dependency named in `require("...")` or `import_module("...")` is named in its own package only."""
    for node in ast.walk(source.tree):
        if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
            continue
        called = ast.unparse(node.func).split(".")[-1]
        package = str(node.args[0].value).split(".")[0]
        if called in ("require", "import_module", "__import__") and package in ROOM_OF_HEAVY:
            if not fnmatch(source.path, ROOM_OF_HEAVY[package]):
                yield Violation("heavy-import", f"{source.path}:{package}", f"belongs in {ROOM_OF_HEAVY[package]}")
