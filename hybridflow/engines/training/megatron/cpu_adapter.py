"""Runs Megatron-Core on machines without CUDA: in its modules, `torch.cuda` and "cuda" mean the CPU.

Megatron-Core names CUDA in about 200 places. Without CUDA, an import hook for `megatron.core` rewrites those places in
the syntax tree of each module as it is imported. `torch.cuda` itself is not changed, so other code in the process is
unaffected. Importing this module installs the hook; the package's `__init__` does so before any of its files imports
Megatron-Core. With CUDA, nothing happens.
"""

import ast
import importlib.abc
import importlib.machinery
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.errors import EngineError

for _message in (
    ".*Apex (is|are) not installed",
    r".*(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    ".*attribute of a Tensor that is not a leaf Tensor is being accessed",
    "TypedStorage is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)  # from inside Megatron-Core; users cannot act on them

_PACKAGE = "megatron.core"
_COLLECTIVES = "megatron.core.tensor_parallel.mappings"
_STAND_IN = "_hybridflow_cpu_for_cuda"
_TENSOR_TYPE = re.compile(r"torch\.cuda\.(Float|Half|BFloat16)Tensor")


class _Idle:
    """A stream or event of a device that runs everything synchronously."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., "_Idle"]:
        return lambda *args, **kwargs: _Idle()

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _Generators:
    """The devices' random generators: always the CPU's."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


class _CpuForCuda:
    """Replaces `torch.cuda` in Megatron-Core; names not defined here are looked up in `torch.cuda`."""

    Stream = Event = _Idle
    FloatTensor, HalfTensor, BFloat16Tensor = torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor
    default_generators = _Generators()
    nvtx = _Idle()
    manual_seed = staticmethod(torch.manual_seed)

    @property
    def random(self) -> "_CpuForCuda":
        return self

    def is_available(self) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def current_stream(self, *args: object, **kwargs: object) -> _Idle:
        return _Idle()

    default_stream = current_stream

    def stream(self, *args: object, **kwargs: object) -> nullcontext[None]:
        return nullcontext()

    device = stream

    def get_rng_state(self, *args: object, **kwargs: object) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(state)

    def synchronize(self, *args: object, **kwargs: object) -> None:
        return None

    empty_cache = set_device = _lazy_init = synchronize

    def _lazy_call(self, callback: Callable[[], object], **kwargs: object) -> None:
        callback()

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cuda, name)


class _ToCpu(ast.NodeTransformer):
    """Rewrites what asks for CUDA; all other code stays as it is."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """`torch.cuda` is the stand-in, and every tensor counts as being on the device."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr == "cuda":
            return ast.copy_location(ast.Name(_STAND_IN, ast.Load()), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(True), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Devices and tensor types by name."""
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and _TENSOR_TYPE.match(node.value):
            return ast.copy_location(ast.Constant(node.value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Turns `tensor.cuda(...)` into `tensor.cpu()`, and drops `record_stream`."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if name == "record_stream":
            return ast.copy_location(ast.Constant(None), node)
        if name == "cuda" and isinstance(node.func, ast.Attribute):
            node.func.attr, node.args, node.keywords = "cpu", [], []
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        """Turns `from torch.cuda import name` into an assignment."""
        if node.module != "torch.cuda":
            return node
        lines = [f"{alias.asname or alias.name} = {_STAND_IN}.{alias.name}" for alias in node.names]
        return ast.parse("\n".join(lines)).body


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of Megatron-Core, rewritten for the CPU."""

    def get_code(self, fullname: str) -> CodeType | None:
        """The rewritten module; modules that never mention CUDA use their cached bytecode."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if b"cuda" not in source:
            return super().get_code(fullname)
        tree = ast.fix_missing_locations(_ToCpu().visit(ast.parse(source, path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        """Executes the module with the replacement of `torch.cuda` among its globals."""
        vars(module)[_STAND_IN] = _CpuForCuda()
        super().exec_module(module)
        if module.__name__ == _COLLECTIVES:
            _allow_uneven_sizes(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of Megatron-Core only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's usual spec, with the rewriting loader."""
        if fullname != _PACKAGE and not fullname.startswith(f"{_PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def _allow_uneven_sizes(module: ModuleType) -> None:
    """Replaces Megatron-Core's collectives along the first dimension by ones that gloo supports for unequal sizes."""
    for name, ours in (("_gather_along_first_dim", gathered), ("_reduce_scatter_along_first_dim", reduce_scattered)):
        vars(module)[name] = _one_of(vars(module)[name], ours)


def _one_of(theirs: Callable[..., Tensor], ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def collective(input_: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None, *rest: bool) -> Tensor:
        is_plain = sizes is None or group.size() == 1
        return theirs(input_, group, sizes, *rest) if is_plain else ours(input_, group, sizes)

    return collective


def gathered(share: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """All ranks' shares concatenated, `sizes` rows of each; they are padded to the largest for the all-gather."""
    padded = share.new_zeros((max(sizes), *share.shape[1:]))
    padded[: len(share)] = share
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scattered(whole: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """This rank's share of the sum over ranks: an all-reduce, of which the share is kept."""
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].clone()


def install() -> None:
    """Installs the hook once, if there is no CUDA."""
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise EngineError(
            "megatron.core was imported before hybridflow could adapt it to a machine without CUDA.",
            remedy="Import hybridflow.engines.training.megatron first, or run on a GPU.",
        )
    sys.meta_path.insert(0, _Finder())


install()
