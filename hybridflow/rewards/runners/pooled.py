"""Runs functions in separate processes with limits: a sample that hangs or crashes its process fails alone."""

import math
import time
from collections.abc import Sequence
from multiprocessing.connection import wait

from hybridflow.config.reward import Reward
from hybridflow.errors import RewardError
from hybridflow.rewards.bound import BoundReward
from hybridflow.rewards.interface import Outcome, Samples
from hybridflow.rewards.resolve import labels_of
from hybridflow.rewards.runners.chunks import Progress, chunks_of
from hybridflow.rewards.runners.forkserver import serve_functions
from hybridflow.rewards.runners.processes import FROM_OUTSIDE, START_SECONDS, ForkServer, PoolProcess

_MEMORY_SECONDS = 0.1
"""How often the memory of busy processes is measured."""


class PooledRunner:
    """Sends chunks of samples to idle processes; a chunk that fails is retried sample by sample.

    A chunk may take `reward.timeout_seconds` per sample. A process that takes longer, uses more than `reward.memory_mb`
    above its baseline, or ends, is replaced. Each process finds the functions by their settings, so they need not be
    picklable; code that has changed meanwhile is an error. The processes end when the runner is closed or collected.

        runner = PooledRunner(config.reward, processes=4)
        outcomes = runner.run(functions, samples, allowed_failures=0)
    """

    def __init__(self, config: Reward, *, processes: int) -> None:
        self._seconds = config.timeout_seconds
        self._memory_mb = config.memory_mb
        self._next_measurement = math.inf if config.memory_mb is None else 0.0
        self._num_processes = processes
        self._server = ForkServer(serve_functions, config, labels=labels_of(config))
        self._processes: list[PoolProcess] = []

    def start(self) -> None:
        """Starts the fork server, which takes longest."""
        self._server.start()

    def close(self) -> None:
        """Ends all processes; `run` starts new ones."""
        for process in self._processes:
            process.connection.close()
        self._processes.clear()
        self._server.close()

    def run(self, functions: Sequence[BoundReward], samples: Samples, *, allowed_failures: int) -> list[Outcome]:
        """One outcome per function, in their order; samples after too many failures are left out."""
        try:
            return self._run(functions, samples, allowed_failures)
        except BaseException:
            self.close()  # processes that still score these samples would answer for those of the next run
            raise

    def _run(self, functions: Sequence[BoundReward], samples: Samples, allowed_failures: int) -> list[Outcome]:
        self._server.start()
        while len(self._processes) < self._num_processes:
            self._processes.append(PoolProcess(self._server))
        numbers = [self._server.labels.index(function.label) for function in functions]
        progress = Progress(functions, samples, allowed_failures)
        for index, function in enumerate(functions):
            progress.add(chunks_of(index, function, samples))
        while progress.has_more() or any(p.chunk and progress.is_needed(p.chunk) for p in self._processes):
            for process in self._processes:
                if process.is_idle and (chunk := progress.next_chunk()) is not None:
                    own = samples.part(chunk.start, chunk.stop)
                    seconds, number = self._seconds * len(chunk), numbers[chunk.function]
                    process.send(chunk, number, own, allowed_failures=allowed_failures, seconds=seconds)
            self._collect(progress)
        for process in [process for process in self._processes if process.chunk]:
            self._replace(process)  # its samples come after too many failures
        return progress.outcomes()

    def _collect(self, progress: Progress) -> None:
        """Waits for a reply, a timeout, or the next measurement of memory, and handles them."""
        active = [process for process in self._processes if not process.is_idle]
        first = min((process.deadline for process in active), default=0.0)
        left = max(0.0, min(first, self._next_measurement) - time.monotonic())
        ready = wait([process.connection for process in active], timeout=left)
        for process in active:
            if process.connection in ready:
                self._receive(process, progress)
            elif time.monotonic() >= process.deadline:
                self._time_out(process, progress)
        self._measure_memory(progress)

    def _receive(self, process: PoolProcess, progress: Progress) -> None:
        reply, chunk = process.receive(), process.chunk
        if isinstance(reply, dict):
            process.become_ready(reply)
            return
        if reply is None:
            ending = self._replace(process)
            if chunk is None:
                raise RewardError(
                    f"A process of the pool {ending} before it had loaded the reward functions.",
                    remedy="Importing their file must neither end the process nor crash it.",
                )
            progress.failed(chunk, f"its process {ending}.", is_from_outside=ending in FROM_OUTSIDE)
            return
        assert chunk is not None, "a reply without a request"
        process.chunk = None
        progress.succeeded(chunk, reply)

    def _time_out(self, process: PoolProcess, progress: Progress) -> None:
        chunk = process.chunk
        self._replace(process)
        if chunk is None:
            raise RewardError(
                f"A process of the pool took longer than {START_SECONDS:g} s to load the reward functions.",
                remedy="Importing their file must not take so long; load models at the first call.",
            )
        several = f"{len(chunk)} x " if len(chunk) > 1 else ""
        progress.failed(chunk, f"it took longer than {several}reward.timeout_seconds={self._seconds:g}.")

    def _measure_memory(self, progress: Progress) -> None:
        """Replaces busy processes that use too much memory; however often it is called, it measures periodically."""
        now, allowed_mb = time.monotonic(), self._memory_mb
        if allowed_mb is None or now < self._next_measurement:
            return
        self._next_measurement = now + _MEMORY_SECONDS
        for process in list(self._processes):
            if process.chunk is not None and process.added_bytes() > allowed_mb * 2**20:
                chunk = process.chunk
                self._replace(process)
                progress.failed(chunk, f"its process exceeded reward.memory_mb={allowed_mb} (above its baseline).")

    def _replace(self, process: PoolProcess) -> str:
        """Replaces a process; returns how it ended."""
        ending = process.end()
        self._processes[self._processes.index(process)] = PoolProcess(self._server)
        return ending
