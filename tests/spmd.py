"""Several ranks of one program, each a process of its own in one gloo world.

Processes are forked from a server that has imported torch and transformers once, so that a world costs a second or
two rather than ten. A test's program is a function at the top of a module: rank programs are sent by name.

    def program(rank: int, scale: float) -> float: ...          # torch.distributed is up

    assert run_ranks(program, 2, 3.0) == [...]                  # what each rank returned
"""

import multiprocessing as mp
import os
import queue
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_PRELOADED = ["torch", "torch.distributed.fsdp", "transformers", "tests.spmd_preload"]
_context = mp.get_context("forkserver")


def preload(*modules: str) -> None:
    """Has more modules imported once, in the server; called where a test file is imported, before any rank is born."""
    _PRELOADED.extend(modules)


def run_ranks(
    program: Callable, num_ranks: int, *args: object, timeout_seconds: float = 240.0, may_die: bool = False
) -> list:
    """What `program(rank, *args)` returned on each rank; raises with the first rank's traceback when one fails.

    With `may_die` the answer of a rank whose process ended without one is its exit status, and no rank waits for the
    others at the end.
    """
    _context.set_forkserver_preload(_PRELOADED)
    answers, port = _context.Queue(), _free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _context.Process(
                target=_rank, args=(program, rank, num_ranks, Path(folder), port, args, answers, may_die), daemon=True
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _gathered(processes, answers, timeout_seconds, may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _gathered(processes: list, answers, timeout_seconds: float, may_die: bool) -> list:
    found: dict[int, object] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(found) < len(processes):
        try:
            rank, answer, failure = answers.get(timeout=0.2)
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in found and process.exitcode is not None and answers.empty():
                    if not may_die:
                        raise AssertionError(
                            f"rank {rank} ended with status {process.exitcode} and no answer"
                        ) from None
                    found[rank] = process.exitcode
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(processes))) - set(found))
                raise AssertionError(f"ranks {missing} gave no answer within {timeout_seconds:g} s") from None
            continue
        if failure:
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        found[rank] = answer
    return [found[rank] for rank in range(len(processes))]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    program: Callable, rank: int, num_ranks: int, folder: Path, port: int, args: tuple, answers, may_die: bool
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        if num_ranks > 1:
            store = dist.FileStore(str(folder / "store"), num_ranks)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120)
            )
        answers.put((rank, program(rank, *args), None))
        if num_ranks > 1 and not may_die:
            dist.barrier()
    except BaseException:  # noqa: BLE001 (whatever it is, the test is to see it)
        answers.put((rank, None, traceback.format_exc()))
    finally:
        answers.close()
        answers.join_thread()
        os._exit(0)
