"""Functions and classes given as objects become settings: a dotted name, or a file that holds a copy of them.

A function of an installed package is named. Any other (of the main script, a notebook, a module of the user's, a
closure) is stored with cloudpickle in a Python file, together with the functions and values of the user's modules that
it refers to. The file is loaded in the same way as a user's `file.py:name`, and needs none of these modules.
"""

import base64
import hashlib
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import _lru_cache_wrapper, lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import ClassVar, TypeVar, cast

import cloudpickle

from hybridflow.api.inputs import Inputs
from hybridflow.config.carried_code import imported_modules
from hybridflow.errors import ConfigError

_MOST_BYTES = 64 << 20
_TRACKER_ID = re.compile(r"[0-9a-f]{32}")

_FILE = '''# {place}
"""A copy of `{name}`, made when the run was started from Python. Loading it runs its code."""

import base64
import sys

import cloudpickle

if sys.version_info[:2] != {python}:
    raise RuntimeError("this copy of a function can be loaded by Python {python[0]}.{python[1]} only")
{name} = cloudpickle.loads(base64.b85decode({pickled!r}))
{source}'''


def setting_of(function: Callable, inputs: Inputs, *, key: str) -> str:
    """The text that names a function, a class or another callable in the setting `key`."""
    if _is_installed(function):
        return f"{function.__module__}.{function.__qualname__}"
    name = _name_of(function)
    try:
        with _users_modules_by_value():
            pickled, identity = _bytes_of(_Copy, function), _identity(function)
    except Exception as error:  # objects fail to be pickled in as many ways as there are classes
        raise ConfigError(
            f"{key}: the function {name!r} cannot be pickled for the processes that call it: {type(error).__name__}:"
            f" {error}.",
            remedy="It is stored with all values that it refers to, which must not be open files, locks or connections."
            f" Create them inside the function, or {_by_file(function)}.",
        ) from error
    if len(pickled) > _MOST_BYTES:
        raise ConfigError(
            f"{key}: {name!r} takes {len(pickled) >> 20} MiB with everything that it refers to, at most"
            f" {_MOST_BYTES >> 20} MiB.",
            remedy=f"Load large objects inside the function, or {_by_file(function)}.",
        )
    text = _FILE.format(
        name=name,
        place=f"{name}: {_place_of(function)}",
        python=sys.version_info[:2],
        pickled=base64.b85encode(pickled).decode(),
        source=_source_of(function),
    )
    path = inputs.keep(f"{name}.py", lambda path: path.write_text(text, encoding="utf-8"), digest=identity)
    return f"{path}:{name}"


def _is_installed(function: Callable) -> bool:
    """Whether it is a function or class of this package, the standard library or an installed package, at the top of
    its module, so that other processes can import it by name."""
    if not isinstance(function, FunctionType | type):
        return False
    module = sys.modules.get(function.__module__)
    if module is None or vars(module).get(function.__qualname__) is not function:
        return False
    if function.__module__ in ("__main__", *imported_modules()) or module.__spec__ is None:
        return False
    return importlib.util.find_spec(function.__module__) is not None


@contextmanager
def _users_modules_by_value() -> Iterator[None]:
    """A block in which cloudpickle copies what is defined in the user's modules instead of naming it."""
    names = {sys.modules[name].__name__ for name in imported_modules()} & sys.modules.keys()
    modules = [sys.modules[name] for name in names - cloudpickle.list_registry_pickle_by_value()]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _defined(function: Callable) -> FunctionType | type:
    """The function or class that a user wrote: of a method, a partial or decorated function, or an object."""
    while not isinstance(function, FunctionType | type):
        match function:
            case partial():
                function = function.func
            case MethodType():
                function = function.__func__
            case _lru_cache_wrapper():
                function = function.__wrapped__
            case _:
                function = type(function)
    return function


def _name_of(function: Callable) -> str:
    name = _defined(function).__name__
    return name if name.isidentifier() else "function"


def _place_of(function: Callable) -> str:
    """The file and line of a definition, for readers; of a notebook, only that."""
    try:
        file, (_, line) = inspect.getsourcefile(_defined(function)), inspect.getsourcelines(_defined(function))
    except (OSError, TypeError):
        return "without a source file"
    return f"{file}, line {line}" if file is not None and Path(file).is_file() else "in a notebook"


def _by_file(function: Callable) -> str:
    """The advice to name a function by its file, which is then imported by each process."""
    name, module = _name_of(function), sys.modules.get(_defined(function).__module__)
    if module is None or module.__name__ not in imported_modules() or vars(module).get(name) is not function:
        return f"move it to a file and name it 'path/file.py:{name}'"
    return f"name it '{module.__file__}:{name}', so that each process imports the file"


def _source_of(function: Callable) -> str:
    """The source as comments, for readers of the file; empty if it is unknown."""
    try:
        source = inspect.getsource(_defined(function))
    except (OSError, TypeError):
        return ""
    return "\n# Its source:\n" + "".join(f"# {line}\n" for line in inspect.cleandoc(source).splitlines())


def _module_state(module: ModuleType) -> tuple:
    """A module of the user's as an empty one that is filled afterwards, since modules refer to one another; others as
    cloudpickle reduces them."""
    reduce = cast(Callable[[ModuleType], tuple], cloudpickle.Pickler.dispatch_table[ModuleType])
    maker, (name, *state) = reduce(module)
    if not state:
        return maker, (name,)
    return ModuleType, (name,), {key: value for key, value in state[0].items() if not key.startswith("__")}


class _Copy(cloudpickle.Pickler):
    """Pickles functions with the user's modules and cached functions that they refer to."""

    dispatch_table: ClassVar = dict(cloudpickle.Pickler.dispatch_table) | {ModuleType: _module_state}

    def reducer_override(self, obj: object):
        """Reduces a cached function of the user's to the function and an empty cache, and a class with the types that
        its annotations name: the names are not known where the copy is loaded."""
        if isinstance(obj, _lru_cache_wrapper):
            if obj.__module__ in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
                return lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2 and "__annotations__" in vars(obj):
            members, _ = cast(tuple[dict[str, object], object], reduced[2])
            with suppress(Exception):  # of the user's annotations, which stay as they are
                members["__annotations__"] = inspect.get_annotations(obj, eval_str=True)
        return reduced


def _placeless(code: CodeType) -> tuple:
    """A code object as cloudpickle reduces it, without its place in a file."""
    reduce = cast(Callable[[CodeType], tuple], cloudpickle.Pickler.dispatch_table[CodeType])
    return reduce(code.replace(co_filename="", co_firstlineno=1, co_linetable=b""))


def _untracked_variable(variable: TypeVar) -> object:
    reduce = cast(Callable[[TypeVar], tuple], cloudpickle.Pickler.dispatch_table[TypeVar])
    return _untracked(reduce(variable))


def _untracked(reduced):
    """A class or type variable as cloudpickle reduces it, without the random identifier that it gives to each."""
    if not isinstance(reduced, tuple) or not isinstance(reduced[1], tuple):
        return reduced
    maker, arguments, *state = reduced
    names = [isinstance(value, str) and _TRACKER_ID.fullmatch(value) for value in arguments]
    return maker, tuple("" if found else value for found, value in zip(names, arguments, strict=True)), *state


class _Identity(_Copy):
    """Pickles equal code to equal bytes, in every process and wherever it is defined."""

    dispatch_table: ClassVar = dict(_Copy.dispatch_table) | {
        CodeType: _placeless,
        TypeVar: _untracked_variable,
    }

    def reducer_override(self, obj: object):
        """Reduces classes without what differs each time, and functions without the paths of their files."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):
            _, module, *_ = cast(tuple[CodeType, dict[str, object]], reduced[1])
            for path in ("__file__", "__path__"):
                module.pop(path, None)
        return _untracked(reduced) if isinstance(obj, type) else reduced

    def persistent_id(self, obj: object) -> object:
        """Stands for a set, whose order is random, as its elements in a fixed order; None for anything else."""
        return sorted(map(_identity, obj)) if isinstance(obj, set | frozenset) else None


def _bytes_of(pickler: type[cloudpickle.Pickler], value: object) -> bytes:
    written = io.BytesIO()
    pickler(written).dump(value)
    return written.getvalue()


def _identity(value: object) -> str:
    """A digest of a value; for a function, of its code, defaults, and the values that it refers to."""
    return hashlib.sha256(_bytes_of(_Identity, value)).hexdigest()
