"""Nothing that the network or a disk says may run: only a closed list of files unpickles (docs/how_to/security.md)."""

import ast
from collections.abc import Iterator

from tests.architecture.source import SourceFile, Violation

MAY_UNPICKLE = {
    "hybridflow/api/functions.py": "writes functions of a notebook into a Python file, which the settings then name",
    "hybridflow/rewards/runners/forkserver.py": "reads its parent's pipe, once, before any program runs",
    "hybridflow/rewards/runners/processes.py": "writes into that pipe",
}
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.distributed.checkpoint"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
    "send_object_list",
    "recv_object_list",
}


def no_code_from_data(source: SourceFile) -> Iterator[Violation]:
    """No pickle, no torch.load without weights_only, and nothing that receives objects: these run what they read."""
    if source.path in MAY_UNPICKLE:
        return
    for node in ast.walk(source.tree):
        for found in (*_imported(node), *_called(node)):
            yield Violation("unpickles", f"{source.path}:{found}", ast.unparse(node)[:120])


def _imported(node: ast.AST) -> Iterator[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and node.module:
        names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in names:
        for unpickler in UNPICKLERS:
            if name == unpickler or name.startswith(f"{unpickler}."):
                yield unpickler
        if name.rpartition(".")[2] in OBJECT_COLLECTIVES or name in ("torch.load", "numpy.load"):
            yield name


def _called(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    name = ast.unparse(node.func)
    if name.endswith(".recv") and not node.args:  # of a multiprocessing connection: a socket's has a size
        yield "Connection.recv"
    if name.rpartition(".")[2] in OBJECT_COLLECTIVES:
        yield name.rpartition(".")[2]
    if name == "torch.load" and said.get("weights_only") != "True":
        yield name
    if name in ("np.load", "numpy.load") and said.get("allow_pickle", "False") != "False":
        yield name
