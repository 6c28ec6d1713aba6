"""Names of a package that are imported when they are first used."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping

from hybridflow.process import uncollected


def lazy_names(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package that imports each name from its module when it is first used.

    `places` maps each name to the module that defines it.
    """

    def imported(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        with uncollected():
            return vars(importlib.import_module(places[name]))[name]

    return imported


def names_with(package: str, places: Iterable[str]) -> Callable[[], list[str]]:
    """The `__dir__` of a package that lists these names, and no others of its own, so that notebooks complete them."""
    return lambda: sorted({*(name for name in vars(sys.modules[package]) if name.startswith("__")), *places})
