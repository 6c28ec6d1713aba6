"""On the path of a process, it writes down who unpickles there; Python imports it at the start by its name.

It stands before `pickle.load`, `loads` and `Unpickler`, and hears of what any other unpickler looks up, without which
no pickle can run code. Each caller is one line in the process's own file in the directory `UNPICKLING_LOG`.
"""

import contextlib
import os
import pickle
import sys
import sysconfig

_PACKAGES = sysconfig.get_path("purelib") + os.sep
_STANDARD = (sysconfig.get_path("stdlib") + os.sep, "<frozen ", "<string>", __file__)
_ON_BEHALF = tuple(f"{_PACKAGES}{name}{os.sep}" for name in ("torch", "numpy"))
"""Libraries that read pickles for whoever calls them: the caller counts."""

_seen: set[str] = set()


def _note() -> None:
    """Writes down the innermost caller outside the standard library, torch and numpy, with its function."""
    frame = sys._getframe(2)
    while frame.f_back and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    line = f"{frame.f_code.co_filename.removeprefix(_PACKAGES)}:{frame.f_code.co_name}"
    if line in _seen:
        return
    _seen.add(line)
    path = os.path.join(os.environ["UNPICKLING_LOG"], str(os.getpid()))
    with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _is_passed(file: str) -> bool:
    return file.startswith(_ON_BEHALF) or (file.startswith(_STANDARD) and not file.startswith(_PACKAGES))


def _hook(event: str, _: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        _note()


class _Unpickler(pickle.Unpickler):
    def __init__(self, *arguments: object, **named: object) -> None:
        _note()
        super().__init__(*arguments, **named)  # type: ignore[arg-type]


def _noted(function):
    def called(*arguments: object, **named: object) -> object:
        _note()
        return function(*arguments, **named)

    return called


sys.addaudithook(_hook)
pickle.load, pickle.loads, pickle.Unpickler = _noted(pickle.load), _noted(pickle.loads), _Unpickler
