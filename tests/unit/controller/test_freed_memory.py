import subprocess
import sys

PROGRAM = """
import resource, torch
from hybridflow.controller.worker_host import WorkerHost

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)  # 64 MiB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = min(faults() for _ in range(6))
WorkerHost(0, device="cpu", node="here", threads=1)
print(before, min(faults() for _ in range(6)))
"""


def test_memory_that_a_cpu_worker_frees_is_used_again_without_page_faults():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert after < before / 10
