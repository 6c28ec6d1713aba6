"""Functions and classes given as objects become settings: a dotted name, or a file that holds a copy of them.

A function that other processes can import is named. Any other (of the main script, a notebook, a closure, a lambda) is
stored with cloudpickle in a Python file, which is loaded in the same way as a user's `file.py:name`.
"""

import base64
import hashlib
import importlib.util
import inspect
import io
import re
import sys
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import ClassVar, TypeVar, cast

import cloudpickle

from hybridflow.api.inputs import Inputs
from hybridflow.config.user_code import FILE_MODULE
from hybridflow.errors import ConfigError

_MOST_BYTES = 64 << 20
_TRACKER_ID = re.compile(r"[0-9a-f]{32}")

_FILE = '''"""A copy of `{name}`, made when the run was started from Python. Loading it runs its code."""

import base64

import cloudpickle

{name} = cloudpickle.loads(base64.b85decode({pickled!r}))
{source}'''


def setting_of(function: Callable, inputs: Inputs, *, key: str) -> str:
    """The text that names a function, a class or another callable in the setting `key`."""
    named = _importable(function)
    if named is not None:
        return named
    name = _name_of(function)
    try:
        pickled, identity = cloudpickle.dumps(function), _identity(function)
    except Exception as error:  # objects fail to be pickled in as many ways as there are classes
        raise ConfigError(
            f"{key}: the function {name!r} cannot be pickled for the processes that call it: {type(error).__name__}:"
            f" {error}.",
            remedy="It must not use open files, locks or connections from outside. Create them inside the function, or"
            f" move it to a file and name it 'path/file.py:{name}'.",
        ) from error
    if len(pickled) > _MOST_BYTES:
        raise ConfigError(
            f"{key}: {name!r} takes {len(pickled) >> 20} MiB with everything that it refers to, at most"
            f" {_MOST_BYTES >> 20} MiB.",
            remedy="Load large objects inside the function, or put it into a file and name it 'path/file.py:function'.",
        )
    text = _FILE.format(name=name, pickled=base64.b85encode(pickled).decode(), source=_source_of(function))
    path = inputs.keep(f"{name}.py", lambda path: path.write_text(text, encoding="utf-8"), digest=identity)
    return f"{path}:{name}"


def _importable(function: Callable) -> str | None:
    """`module.name` or `file.py:name` of a function or class that other processes can import; None for others."""
    if not isinstance(function, FunctionType | type):
        return None
    module, name = sys.modules.get(function.__module__), function.__qualname__
    if module is None or function.__module__ == "__main__" or vars(module).get(name) is not function:
        return None
    if function.__module__.startswith(FILE_MODULE):
        return f"{module.__file__}:{name}"
    if module.__spec__ is None or importlib.util.find_spec(function.__module__) is None:
        return None
    return f"{function.__module__}.{name}"


def _name_of(function: Callable) -> str:
    name = function.__name__ if isinstance(function, FunctionType | type) else type(function).__name__
    return name if name.isidentifier() else "function"


def _source_of(function: Callable) -> str:
    """The source as comments, for readers of the file; empty if it is unknown."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return "\n# Its source:\n" + "".join(f"# {line}\n" for line in inspect.cleandoc(source).splitlines())


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


class _Identity(cloudpickle.Pickler):
    """Pickles equal code to equal bytes, in every process and wherever it is defined."""

    dispatch_table: ClassVar = dict(cloudpickle.Pickler.dispatch_table) | {
        CodeType: _placeless,
        TypeVar: _untracked_variable,
    }

    def reducer_override(self, obj: object):
        """Reduces classes without what differs each time."""
        reduced = super().reducer_override(obj)
        return _untracked(reduced) if isinstance(obj, type) else reduced

    def persistent_id(self, obj: object) -> object:
        """Stands for a set, whose order is random, as its elements in a fixed order; None for anything else."""
        return sorted(map(_identity, obj)) if isinstance(obj, set | frozenset) else None


def _identity(value: object) -> str:
    """A digest of a value; for a function, of its code, defaults, and the values that it refers to."""
    written = io.BytesIO()
    _Identity(written).dump(value)
    return hashlib.sha256(written.getvalue()).hexdigest()
