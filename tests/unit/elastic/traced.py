"""Kills a forked child at its n-th call that changes the file system, by tracing its system calls (ptrace).

As a script it reads one request a line (run directory, number of the call), lets a child save a checkpoint, and answers
with the child's exit status and the number of such calls it made.
"""

import ctypes
import json
import os
import platform
import signal
import sys
from pathlib import Path

import torch

from hybridflow.elastic.checkpoint import CheckpointStore
from hybridflow.elastic.retention import Retention
from hybridflow.elastic.saving import Saving
from hybridflow.models.shard_files import plan_directory
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.part_records import PartWriter
from tests.unit.elastic.victim import save

TRACE_ME, CONTINUE_TO_CALL, SET_OPTIONS, CALL_INFO = 0, 24, 0x4200, 0x420E
IS_CALL, NEW_THREADS, END_WITH_TRACER = 0x1, 0x8, 0x100000
ALL_THREADS = 0x40000000
ENTRY, NUMBER_AT, ARGUMENTS_AT = 1, 24, 32

_OF_X86 = {
    "write": 1, "open": 2, "pwrite64": 18, "sendfile": 40, "fsync": 74, "truncate": 76, "ftruncate": 77, "rename": 82,
    "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87, "symlink": 88, "openat": 257, "mkdirat": 258, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "renameat2": 316, "copy_file_range": 326,
}  # fmt: skip
_OF_ARM = {
    "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "truncate": 45, "ftruncate": 46,
    "openat": 56, "write": 64, "pwrite64": 68, "sendfile": 71, "fsync": 82, "renameat2": 276, "copy_file_range": 285,
}  # fmt: skip
CALLS = {"x86_64": _OF_X86, "aarch64": _OF_ARM}.get(platform.machine(), {})
"""The calls that change a file system, and their numbers; empty on machines that are not known."""

_FLAGS = {CALLS[name]: argument for name, argument in (("open", 1), ("openat", 2)) if name in CALLS}
"""The argument with the flags of calls that only count if they create or write."""


def ptrace(request: int, pid: int, address: int = 0, data: object = 0) -> int:
    """Raises `OSError` if the call fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    answer = libc.ptrace(request, pid, address, data)
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def save_in_background(store: CheckpointStore, step: int) -> None:
    """A checkpoint as a worker writes it in the background, with weights that name the step."""
    saving = Saving(store, step, {"step": step, "loss": 0.1 * step})
    directory = saving.directory()
    (directory / "actor").mkdir()
    weights = [WeightShard.full("weight", torch.full((64,), float(step)))]

    def write_rest(target: Path) -> None:
        (target / "config.json").write_text("{}")

    planned = plan_directory(weights, directory / "actor" / "huggingface", Ranks.alone(), write_rest=write_rest)
    PartWriter(planned.copied().write, directory, "actor", rank=0, num_ranks=1).start()
    saving.publish({"actor": 1})
    saving.result()


SAVES = {"at once": save, "in the background": save_in_background}


def save_traced(kind: str, run_dir: Path, kill_at: int | None) -> tuple[int, int]:
    """The exit status of a child that saves step 2, keeping one checkpoint, and the number of calls that it made."""
    child = os.fork()
    if child == 0:
        ptrace(TRACE_ME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        SAVES[kind](CheckpointStore(run_dir, keep=Retention(1)), 2)
        os._exit(0)
    os.waitpid(child, 0)
    ptrace(SET_OPTIONS, child, 0, IS_CALL | NEW_THREADS | END_WITH_TRACER)
    ptrace(CONTINUE_TO_CALL, child)
    calls, info = 0, ctypes.create_string_buffer(128)
    while True:
        thread, status = os.waitpid(-1, ALL_THREADS)
        if not os.WIFSTOPPED(status):
            if thread == child:
                return os.waitstatus_to_exitcode(status), calls
            continue
        passed_on, stopped_by = 0, os.WSTOPSIG(status)
        try:
            if stopped_by == signal.SIGTRAP | 0x80:
                ptrace(CALL_INFO, thread, len(info), ctypes.addressof(info))
                calls += _changes_files(info.raw)
                if calls == kill_at:
                    os.kill(child, signal.SIGKILL)
            elif stopped_by not in (signal.SIGTRAP, signal.SIGSTOP):
                passed_on = stopped_by
            ptrace(CONTINUE_TO_CALL, thread, 0, passed_on)
        except ProcessLookupError:  # it was killed, or the process has ended
            continue


def _changes_files(info: bytes) -> bool:
    def at(place: int) -> int:
        return int.from_bytes(info[place : place + 8], "little")

    number = at(NUMBER_AT)
    if info[0] != ENTRY or number not in CALLS.values():
        return False
    flags = _FLAGS.get(number)
    return flags is None or bool(at(ARGUMENTS_AT + 8 * flags) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def main() -> None:
    """Serve requests until standard input ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(save_traced(request["kind"], Path(request["run_dir"]), request["kill_at"])), flush=True)


if __name__ == "__main__":
    main()
