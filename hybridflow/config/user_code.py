"""Functions and classes that users write: from a file (`path/file.py:name`) or by a dotted path (`my_package.name`)."""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from hybridflow.config.carried_code import code_here
from hybridflow.config.installed import is_installed
from hybridflow.config.nearest import did_you_mean
from hybridflow.config.paths import user_path
from hybridflow.errors import LONGEST_TEXT, ConfigError

FILE_MODULE = "hybridflow_user_"
"""Prefix of the names of modules that are loaded from `path/file.py:name`."""


@contextmanager
def ending_forks() -> Iterator[None]:
    """Ends processes that user code forks within the block when they leave it; only the original process continues.

    Otherwise a child would share its parent's connections and answer in its place.
    """
    owner = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != owner:
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            os._exit(1)
        raise
    if os.getpid() != owner:
        os._exit(0)


@contextmanager
def reporting_exits(owner: str, *, callers: Collection[str]) -> Iterator[None]:
    """Turns a `sys.exit` in user code into a `ConfigError`; `owner` is what the user wrote, `callers` our own files."""
    try:
        yield
    except SystemExit as error:
        raise ConfigError(
            f"{owner} called sys.exit: {described(error, callers={__file__, *callers})}.",
            remedy="Raise an exception instead. Put what runs as a script under: if __name__ == '__main__'.",
        ) from error


def load_member(setting: str, *, key: str) -> object:
    """Imports what `key=setting` names. Raises `ConfigError` if it cannot. Processes that the file forks end."""
    path, colon, name = setting.rpartition(":")
    if colon and path.endswith(".py"):
        file = Path(os.path.abspath(user_path(path, key=key)))
        return _member(_module_of_file(code_here(file), setting, key), name, setting, key)
    if setting.endswith(".py"):
        raise ConfigError(f"{key}={setting} names a file only.", remedy=f"Write {setting}:name.")
    module, dot, name = setting.rpartition(".")
    if not dot or colon:
        raise ConfigError(
            f"{key}={setting} must be a path to a function or class.",
            remedy="Write path/file.py:name, or my_package.name.",
        )
    try:
        with reporting_exits(f"{key}={setting}: the module {module}", callers=()), ending_forks():
            imported = importlib.import_module(module)
        return _member(imported, name, setting, key)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}={setting}: the module {module} cannot be imported: {described(error, callers={__file__})}.",
            remedy="Check the name, and that its package is installed or in the current directory.",
        ) from error


def load_callable(setting: str, *, key: str, what: str = "function") -> Callable[..., object]:
    """The same; raises `ConfigError` for what cannot be called. `what` it should be is for the error."""
    found = load_member(setting, key=key)
    if not callable(found):
        raise ConfigError(
            f"{key}: {setting} is of type {type(found).__name__}, not a {what}.", remedy=f"Name a {what}."
        )
    return found


def named_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name, without `*args` and `**kwargs`."""
    found = inspect.signature(function).parameters
    return {name: each for name, each in found.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}


def described(error: BaseException, *, callers: Collection[str]) -> str:
    """Describes an error and the line that raised it: `ValueError: bad answer (reward.py, line 12)`.

    If an installed library raised it, this is the line that called the library. `callers` are our own files through
    which the user's code was called; their lines are omitted. Long texts are cut.
    """
    text = f"{type(error).__name__}: {_text(error)}"[:LONGEST_TEXT]
    if isinstance(error, SyntaxError):
        return text
    frames = user_frames(error, callers=callers)
    frames = [frame for frame in frames if not is_installed(frame.filename)] or frames
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{text}{place}"


def _text(error: BaseException) -> str:
    """The text of an error of a user's class, which may fail to give one."""
    try:
        return str(error)
    except Exception as flaw:  # noqa: BLE001 (the code of a user may raise anything)
        return f"(its text is not known: its __str__ raised {type(flaw).__name__})"


def user_frames(error: BaseException, *, callers: Collection[str]) -> list[traceback.FrameSummary]:
    """The stack frames that led to an error, starting in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename not in callers and "importlib" not in frame.filename]


def _module_of_file(file: Path, setting: str, key: str) -> ModuleType:
    if not file.is_file():
        others = sorted(found.name for found in file.parent.glob("*.py")) if file.parent.is_dir() else []
        hint = did_you_mean(file.name, others, are_files=True) or (
            f"'{file.parent}' has: {', '.join(others[:8])}. " if others else ""
        )
        raise ConfigError(f"{key}={setting}: there is no file '{file}'.", remedy=f"{hint}Name a file that exists.")
    name = f"{FILE_MODULE}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"no import machinery for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with reporting_exits(f"{key}={setting}: the file", callers=()):
        try:
            with ending_forks():
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            if isinstance(error, SystemExit):
                raise
            raise ConfigError(
                f"{key}={setting}: the file cannot be run: {described(error, callers={__file__})}.",
                remedy=f"Try: python {file}",
            ) from error
    return module


def _member(module: ModuleType, name: str, setting: str, key: str) -> object:
    if name in vars(module):
        return vars(module)[name]
    functions = {n: v for n, v in vars(module).items() if not n.startswith("__") and callable(v)}
    own = [n for n, v in functions.items() if not n.startswith("_") and v.__module__ == module.__name__]
    raise ConfigError(
        f"{key}={setting}: there is no '{name}' in it.",
        remedy=f"{did_you_mean(name, functions)}It has: {', '.join(own) or 'no functions or classes'}.",
    )
