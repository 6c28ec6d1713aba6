"""How much memory a process uses, with all that it has started."""

import os
import sys
from pathlib import Path

import psutil


def used_bytes(process: int) -> int:
    """Memory in use that no file backs: what is reserved and not touched, and pages of mapped files, do not count.

    0 for a process that has ended. Where there is no /proc: what psutil finds resident, of the process alone.
    """
    if sys.platform != "linux":
        return psutil.Process(process).memory_info().rss if psutil.pid_exists(process) else 0
    total, waiting = 0, [process]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            _, resident, shared, *_ = (folder / "statm").read_text().split()
            total += int(resident) - int(shared)
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue  # it has ended meanwhile, or this kernel does not tell its children
    return total * os.sysconf("SC_PAGE_SIZE")
