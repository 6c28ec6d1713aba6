"""Runs a function on several ranks, each in a process of its own, and returns their answers."""

# pyright: reportPrivateImportUsage=false

import logging
import multiprocessing
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

import hybridflow.controller.backends.ray.host  # noqa: F401 (every rank of a run imports it, which takes memory)
from hybridflow.controller.freed_memory import keep_freed_memory
from hybridflow.controller.rendezvous import let_gloo_listen_at
from hybridflow.errors import HybridflowError, ResourceError

AnswerT = TypeVar("AnswerT")

_POLL_SECONDS = 0.2
_GROUP_SECONDS = 120.0
_LONGEST_TRACEBACK = 3000


class Place(NamedTuple):
    """The place of a process: its rank, the number of ranks, and its device."""

    rank: int
    size: int
    device: torch.device


def run_on(
    kind: str, size: int, program: Callable[..., AnswerT], *args: object, timeout_seconds: float = 180.0
) -> list[AnswerT]:
    """Runs `program(place, *args)` on `size` ranks, on devices of a kind (`cpu`, `cuda`); returns their answers.

    On CPUs, each process computes with one thread. `program` is a function of a module, and its arguments and answers
    can be pickled. Raises the error of the first rank that fails, and ends all processes.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_rank, args=(kind, rank, size, store, answers, program, args), daemon=True)
            for rank in range(size)
        ]
        try:
            for process in processes:
                process.start()
            return _gathered(processes, answers, timeout_seconds)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _gathered(processes: Sequence[BaseProcess], answers: Any, timeout_seconds: float) -> list:
    found: dict[int, Any] = {}
    ends = time.monotonic() + timeout_seconds
    while len(found) < len(processes):
        try:
            rank, answer, error = answers.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            _check_alive(processes, found, answers)
            if time.monotonic() > ends:
                raise ResourceError(
                    f"The measurement on {len(processes)} processes did not end within {timeout_seconds:g} s.",
                    remedy="Stop other programs on this machine, and calibrate again.",
                ) from None
            continue
        if error is not None:
            raise error
        found[rank] = answer
    return [found[rank] for rank in range(len(processes))]


def _check_alive(processes: Sequence[BaseProcess], found: dict[int, object], answers: Any) -> None:
    for rank, process in enumerate(processes):
        if rank not in found and process.exitcode is not None and answers.empty():
            raise ResourceError(
                f"Process {rank} of {len(processes)} ended with exit status {process.exitcode} while it measured.",
                remedy="It was killed or ran out of memory: see the messages above and the kernel's log (dmesg).",
            )


def _rank(kind: str, rank: int, size: int, store: str, answers: Any, program: Callable[..., Any], args: tuple) -> None:
    logging.disable(logging.WARNING)
    try:
        device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
            keep_freed_memory()
        let_gloo_listen_at("127.0.0.1")
        if size > 1:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=_GROUP_SECONDS),
            )
        answers.put((rank, program(Place(rank, size, device), *args), None))
        if size > 1:
            dist.barrier()
    except HybridflowError as error:
        answers.put((rank, None, error))
    except Exception as error:  # noqa: BLE001 (it is raised in the process that waits for the answer)
        answers.put((rank, None, _failed(rank, error)))
    answers.close()
    answers.join_thread()


def _failed(rank: int, error: Exception) -> ResourceError:
    text = "".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:]
    return ResourceError(
        f"The measurement on process {rank} failed: {type(error).__name__}: {error}",
        remedy=f"Its traceback shows where:\n{text}",
    )
