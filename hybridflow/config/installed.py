"""Which files belong to Python, to installed packages or to this package; all others are the user's."""

import os
import sysconfig
from functools import cache
from pathlib import Path

_PACKAGES = {"site-packages", "dist-packages"}
_OURS = Path(__file__).resolve().parents[1]


def is_installed(file: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or this package, also if it is frozen.

    Not everything below the prefix of an installation does: with /usr, a user's files may be in /usr/src.
    """
    return file.startswith("<frozen") or _is_of_packages(os.path.dirname(file))


@cache
def _is_of_packages(directory: str) -> bool:
    path = Path(directory)
    return not _PACKAGES.isdisjoint(path.parts) or any(path.resolve().is_relative_to(root) for root in _roots())


@cache
def _roots() -> frozenset[Path]:
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return frozenset({Path(directory).resolve() for directory in own} | {_OURS})
