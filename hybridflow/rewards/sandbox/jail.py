"""Runs in the process of an untrusted program: drops all privileges it can, then runs the program.

Run as `python -I jail.py JOB VERDICT`, the descriptors of a file and of a socket; imports only the standard library.
The job is JSON. A program without tests reads its standard input and writes its output, which `runs.py` checks. One
with tests is loaded as a module. Then each test runs in its namespace, and the verdict is sent to the socket, after a
secret word that is only received once the program is loaded. The verdict holds the values of the expressions that a
test asks for, or for a test that is not split, whether it ran without raising.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, NoReturn

UNCONFINED = 97
"""The exit status if a restriction could not be applied; the program was not run."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 1, 38, 22
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CAPSET = {"x86_64": 126, "aarch64": 91}
_READ_FILE, _READ_DIR, _EXECUTE = 1 << 2, 1 << 3, 1 << 0
_MAKE_CHAR, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 10, 1 << 11
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_TCP, _SCOPES = 0b11, 0b11

_LONG = 10**300
"""Beyond it, Python may refuse to convert an integer to or from decimal digits."""
_PARTS: dict[type, Callable[[Any], Iterator]] = {kind: kind.__iter__ for kind in (list, tuple, set, frozenset)}

Test = str | dict
"""Text to run as a whole, or the steps of a split test."""


def main(job_descriptor: int, verdict_descriptor: int) -> None:
    """Reads the job, applies its restrictions, and runs the program."""
    with os.fdopen(job_descriptor) as file:
        job = json.load(file)
    verdict = socket.socket(fileno=verdict_descriptor)
    try:
        die_with(job["parent"])
        _limit(job["limits"])
        if job["is_confined"]:
            _confine(job)
    except OSError as error:
        verdict.sendall(str(error).encode())
        os._exit(UNCONFINED)
    program: str = job["program"]
    tests: list[Test] | None = job["tests"]
    del job
    own, exit_ = dict(vars(builtins)), os._exit
    sys.modules["__main__"] = ModuleType("__main__")  # hides this module from the program
    if tests is None:
        verdict.close()
        _exit(_status_of(program, sys.modules["__main__"]))
    module = sys.modules["program"] = ModuleType("program")
    status = _status_of(program, module)
    if status:
        _exit(status)
    # Undo what the program may have set up to interfere with its tests.
    builtins.__dict__.update(own)
    sys.settrace(None)
    sys.setprofile(None)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if len(sys._current_frames()) > 1:
        sys.stderr.write("the program left threads running\n")
        exit_(1)
    verdict.sendall(b"?")
    word = verdict.recv(32)
    for test in tests:
        verdict.sendall(word + _verdict(test, module))
    _exit(0)


def _verdict(test: Test, module: ModuleType) -> bytes:
    """The verdict of one test: the values it asks for, or for a test that is not split, 1 if it passes and 0 if not."""
    if not isinstance(test, str):
        return _answers(test["steps"], dict(module.__dict__) if test["apart"] else module.__dict__)
    try:
        exec(compile(test, "test", "exec"), module.__dict__)
    except BaseException:  # noqa: BLE001
        _print_error()
        return b"0"
    return b"1"


def _answers(steps: list[list[str]], names: dict) -> bytes:
    """JSON of the values asked for, null for one that raised or cannot be encoded; 0 if a statement raised."""
    values = []
    for kind, text in steps:
        try:
            if kind == "ask":
                values.append(json.dumps(_encoded(eval(compile(text, "test", "eval"), names))))
            else:
                exec(compile(text, "test", "exec"), names)
        except BaseException:  # noqa: BLE001
            _print_error()
            if kind != "ask":
                return b"0"
            values.append("null")
    return f"[{', '.join(values)}]".encode()


def _encoded(value: Any) -> object:
    """A plain value as JSON that `values.py` decodes, whatever methods its class overrides. Raises for others."""
    if value is None:
        return ["None"]
    if isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if -_LONG < value < _LONG else ["int", hex(value)]
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            return [kind.__name__, *map(_encoded, parts(value))]
    if isinstance(value, dict):
        return ["dict", *(["tuple", _encoded(key), _encoded(each)] for key, each in dict.items(value))]
    return _encoded_other(value)


def _encoded_other(value: Any) -> object:
    if isinstance(value, type({}.keys()) | type({}.items())):
        return ["set", *map(_encoded, value)]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    if type(value).__module__ == "numpy" and not value.shape:
        return _encoded(value.item())
    return ["fraction", *map(hex, value.as_integer_ratio())]


def _status_of(program: str, module: ModuleType) -> int:
    """Runs a program; returns the status with which a process of its own would have exited."""
    try:
        code: CodeType = compile(program, "program.py", "exec")
        exec(code, module.__dict__)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001
        _print_error()
        return 1
    return 0


def _print_error() -> None:
    sys.stderr.write(traceback.format_exc(limit=-3, chain=False))


def _exit(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the program closed it
            status = status or 1
    os._exit(status & 0xFF)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent (on Linux, the thread that started it) ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise OSError("the parent process has ended")


def _limit(limits: dict[str, float]) -> None:
    megabyte, seconds = 2**20, int(limits["cpu_seconds"])
    memory, scratch = int(limits["memory_mb"]) * megabyte, int(limits["scratch_mb"]) * megabyte
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (scratch, scratch))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _confine(job: dict) -> None:
    """Drops privileges, capabilities, access to files, and system calls. Raises `OSError` if it cannot."""
    if job["filter"] is None:
        raise OSError("there is no filter of system calls for this machine")
    library = ctypes.CDLL(None, use_errno=True)
    _checked(library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header, nothing = struct.pack("II", 0x20080522, 0), bytes(24)
    _checked(library.syscall(_CAPSET[os.uname().machine], header, nothing), "capset")
    _restrict_files(library, job["readable"], job["scratch"], job["landlock"])
    own = os.getpid()
    packed = b"".join(struct.pack("HBBI", c, t, f, own if k is None else k) for c, t, f, k in job["filter"])
    buffer = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(job["filter"]), ctypes.addressof(buffer))
    _checked(library.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0), "seccomp")


def _restrict_files(library: ctypes.CDLL, readable: list[str], scratch: str, newest: int) -> None:
    """Landlock: these paths may be read, the scratch directory may be written, and nothing else may be opened."""
    version = library.syscall(_CREATE_RULESET, None, 0, 1)
    _checked(min(version, 0), "Landlock (Linux 5.13 or newer, and not turned off)")
    version = min(version, newest)
    handled = (1 << 13) - 1 | (_REFER * (version >= 2)) | (_TRUNCATE * (version >= 3)) | (_IOCTL * (version >= 5))
    attributes = struct.pack("QQQ", handled, _TCP * (version >= 4), _SCOPES * (version >= 6))
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = library.syscall(_CREATE_RULESET, attributes, size, 0)
    _checked(min(ruleset, 0), "Landlock's ruleset")
    in_scratch = handled & ~(_EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_FIFO | _MAKE_BLOCK)
    for path, allowed in [*((path, _READ_FILE | _READ_DIR) for path in readable), (scratch, in_scratch)]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        own = allowed if os.path.isdir(path) else allowed & _READ_FILE
        rule = struct.pack("=Qi", own, descriptor)
        _checked(library.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0), f"Landlock's rule for {path}")
        os.close(descriptor)
    _checked(library.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
