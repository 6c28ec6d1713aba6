"""Measures how fast this machine multiplies matrices of float32: prints operations per second, as JSON.

    python benchmarks/matrix_rate.py 2

The best of several products of 1024 x 1024 matrices, which the caches of a processor hold, on that many threads.
"""

import json
import sys
import time

import torch

SIDE = 1024
SECONDS = 1.0


def main(threads: int) -> None:
    """Measures, and prints one JSON line."""
    torch.set_num_threads(threads)
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while (started := time.perf_counter()) < until:
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - started)
    sys.stdout.write(json.dumps({"flops": 2 * SIDE**3 / best}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
