import platform
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, torch
from hybridflow.controller.worker_host import WorkerHost

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks mapped usm fsm used free top".split()]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

def taken(mib):
    held = [torch.ones(mib << 18) for _ in range(8)]
    mapped = mallinfo().mapped
    del held
    return mapped - mallinfo().mapped, mallinfo().arena

WorkerHost(0, device="cpu", node="here", threads=1)
print(*taken(6), *taken(16))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_cpu_worker_keeps_freed_blocks_unless_they_are_large():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    small_returned, heap, large_returned, _ = map(int, done.stdout.split())
    assert small_returned == 0
    assert heap >= 8 * 6 << 20
    assert large_returned >= 4 * 16 << 20, "those that free blocks have no room for"
