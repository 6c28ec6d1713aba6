"""Functions in processes of their own, with limits: a slow or crashing one costs its sample, and nothing else."""

import math
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.runners.chunks import Board, chunks_of
from hybridflow.rewards.runners.messages import Raised, Ready
from hybridflow.rewards.runners.processes import START_SECONDS, Nursery, PoolProcess

_LOOK_SECONDS = 0.1
"""How often the memory of busy processes is looked at."""


class PooledRunner:
    """Chunks of samples go to whichever process is free; a chunk that fails is tried again, a sample at a time.

    A chunk may take `reward.timeout_seconds` for each of its samples. A process that takes longer, that comes to use
    more than `reward.memory_mb` beside what it began with, or that ends, is replaced. Functions are found anew in each
    process, by what the user wrote, so none has to be picklable; code that changed meanwhile is an error.

        runner = PooledRunner(config.reward, processes=4)
        outcomes = runner.run(functions, samples, allowed_failures=0)
        runner.close()
    """

    def __init__(self, config: Reward, *, processes: int) -> None:
        self._seconds = config.timeout_seconds
        self._memory_mb = config.memory_mb
        self._next_look = math.inf if config.memory_mb is None else 0.0
        self._num_processes = processes
        self._nursery = Nursery(config)
        self._processes: list[PoolProcess] = []

    def start(self) -> None:
        """Starts what begets the processes, which takes longest."""
        self._nursery.start()

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome a function, in their order; what comes after too many failures is left out."""
        self._nursery.start()
        while len(self._processes) < self._num_processes:
            self._processes.append(self._nursery.beget())
        numbers = [self._nursery.labels.index(function.label) for function in functions]
        board = Board(functions, samples, allowed_failures)
        for index, function in enumerate(functions):
            board.add(chunks_of(index, function, samples))
        while board.has_more() or any(p.chunk is not None and board.is_wanted(p.chunk) for p in self._processes):
            for process in self._processes:
                if process.is_idle and (chunk := board.next_chunk()) is not None:
                    own = samples.part(chunk.start, chunk.stop)
                    process.give(chunk, numbers[chunk.function], own, seconds=self._seconds * len(chunk))
            self._collect(board)
        for process in [process for process in self._processes if process.chunk is not None]:
            self._replace(process)  # its samples come after too many failures
        return board.outcomes()

    def close(self) -> None:
        """Ends all processes."""
        self._nursery.close()
        self._processes.clear()

    def _collect(self, board: Board) -> None:
        """Waits until a process says something, or has had its time, or memory is to be looked at."""
        active = [process for process in self._processes if not process.is_idle]
        first = min((process.deadline for process in active), default=0.0)
        left = max(0.0, min(first, self._next_look) - time.monotonic())
        ready = wait([process.connection for process in active], timeout=left)
        for process in active:
            if process.connection in ready:
                self._take(process, board)
            elif time.monotonic() >= process.deadline:
                self._overdue(process, board)
        self._look_at_memory(board)

    def _take(self, process: PoolProcess, board: Board) -> None:
        answer, chunk = process.receive(), process.chunk
        if isinstance(answer, Ready):
            process.become_ready(answer.code)
            return
        if answer is None:
            end = self._replace(process)
            if chunk is None:
                raise RewardError(
                    f"A process of the pool {end} before it had loaded the reward functions.",
                    remedy="Importing their file must neither end the process nor crash it.",
                )
            board.failed(chunk, f"its process {end}.")
            return
        assert chunk is not None, "an answer that nobody asked for"
        process.chunk = None
        if isinstance(answer, Raised):
            board.failed(chunk, answer.message, answer.trace, by_raising=True, of_all=answer.of_all)
        else:
            board.answered(chunk, answer)

    def _overdue(self, process: PoolProcess, board: Board) -> None:
        chunk = process.chunk
        self._replace(process)
        if chunk is None:
            raise RewardError(
                f"A process of the pool took longer than {START_SECONDS:g} s to load the reward functions.",
                remedy="Importing their file must not take so long; load models at the first call.",
            )
        several = f"{len(chunk)} x " if len(chunk) > 1 else ""
        board.failed(chunk, f"it took longer than {several}reward.timeout_seconds={self._seconds:g}.")

    def _look_at_memory(self, board: Board) -> None:
        """Replaces busy processes that use too much, every `_LOOK_SECONDS` however often the others answer."""
        now, allowed_mb = time.monotonic(), self._memory_mb
        if allowed_mb is None or now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        for process in list(self._processes):
            if process.chunk is not None and process.added_bytes() > allowed_mb * 2**20:
                chunk = process.chunk
                self._replace(process)
                reason = f"its process came to use more than reward.memory_mb={allowed_mb} beside what it began with."
                board.failed(chunk, reason)

    def _replace(self, process: PoolProcess) -> str:
        """Another process takes its place; how it ended."""
        end = process.end()
        self._processes[self._processes.index(process)] = self._nursery.beget()
        return end
