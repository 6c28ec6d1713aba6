"""The modules that a process has imported, so that another one can import them before it needs them."""

import logging
import os
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from hybridflow.process import uncollected

_READ_AT_IMPORT = ("VLLM_",)
"""Packages read environment variables that begin so when they are imported."""

_ROOTS = (sysconfig.get_paths()["purelib"], str(Path(__file__).parents[3]))


@dataclass(frozen=True)
class Loaded:
    """Modules in the order of their import, and the environment variables that they read."""

    modules: tuple[str, ...]
    variables: dict[str, str]


def loaded_modules() -> Loaded:
    """The modules of installed packages and of this one that this process has imported; none of a user's own files."""
    modules = (name for name, module in list(sys.modules.items()) if _is_installed(module))
    variables = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    return Loaded(tuple(modules), variables)


def load(loaded: Loaded) -> None:
    """Imports these modules, as far as they can be imported here."""
    os.environ.update(loaded.variables)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the process of a rank reports what they log
    try:
        with uncollected():
            for name in loaded.modules:
                with suppress(Exception):
                    import_module(name)
    finally:
        logging.disable(before)


def _is_installed(module: object) -> bool:
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return isinstance(file, str) and file.startswith(_ROOTS)
