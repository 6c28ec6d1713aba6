"""Reuse of freed memory on CPUs.

By default, the C library returns large freed blocks to the kernel, and each new tensor pays again for a page fault per
4 KiB: on a virtual machine, up to ten times the cost of the elementwise operation that fills it.
"""

import ctypes
import platform
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_KEPT_BYTES = 1 << 30


@cache
def keep_freed_memory() -> None:
    """Blocks that this process frees stay in its heap, of which at most 1 GiB is free at the top; only with glibc."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
