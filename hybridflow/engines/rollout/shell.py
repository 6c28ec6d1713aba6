"""Shared by all rollout engines: the states of `RolloutEngine`, its running rows, and `generate` in terms of both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from hybridflow.batch import Batch
from hybridflow.batch.row_names import row_names
from hybridflow.config.rollout import Sampling
from hybridflow.engines.rollout.memory import Released, WeightBuffer
from hybridflow.engines.rollout.requests import Request, Responses, checked_prompts, make_requests, response_batch
from hybridflow.errors import EngineError, StaleWeightsError
from hybridflow.observability.activity import ACTIVITY
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


class RolloutShell(ABC):
    """The part of a `RolloutEngine` that does not depend on the engine; each engine inherits from it.

    `buffer` holds the weights, if there are any, and `slots` are views of it. Prompts and responses have at most
    `limit_tokens` together.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        buffer: WeightBuffer | None,
        slots: Mapping[str, WeightShard],
        *,
        limit_tokens: int,
        has_weights: bool = True,
    ) -> None:
        self.mesh = mesh
        self.version = 0
        self.is_asleep = self.is_paused = False
        self._buffer = buffer
        self._slots = slots
        self._limit_tokens = limit_tokens
        self._missing = None if has_weights else "have not been written yet"
        """Completes "The rollout's weights ..." while they are incomplete."""
        self.num_steps = 0
        self._next_number = 0
        self._unfinished: dict[int, Request] = {}
        self._num_uncollected = 0
        self._finished: list[Responses] = []
        self._submitted: dict[tuple[int, int], Request] = {}
        self._sampling = Sampling()
        """Settings of the rows submitted last."""

    @abstractmethod
    def _start(self, requests: Sequence[Request]) -> None:
        """Begins to generate requests that were made together, at the next `_step`."""

    @abstractmethod
    def _step(self) -> int:
        """Samples one token per request that has a place; returns how many requests finished."""

    @abstractmethod
    def _collect(self) -> list[Responses]:
        """The requests that have finished since the last call."""

    @abstractmethod
    def _interrupt(self) -> None:
        """Frees keys and values of all requests, which the next `_step` computes again."""

    @abstractmethod
    def _so_far(self) -> Iterable[tuple[Request, int]]:
        """All unfinished requests, with their number of tokens so far; nothing is left to collect."""

    @abstractmethod
    def _removed(self, requests: Sequence[Request]) -> Responses:
        """Stops some unfinished requests, and returns their tokens so far."""

    def _check_same(self, *parts: object) -> None:
        """Raises if ranks that hold one model together were called with different arguments."""
        assert self.mesh.count_along(("pipeline", "tensor")) == 1, "an engine that is divided checks them"

    @property
    def num_running(self) -> int:
        """See `RolloutEngine.num_running`."""
        return len(self._submitted)

    def generate(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> Batch:
        requests = self._requests(prompts, sampling, max_response_tokens, seed)
        own = {request.number for request in requests}
        try:
            self._begin(requests)
            while num_left := len(own & self._unfinished.keys()):
                while self._num_uncollected < num_left:  # collecting takes as long as a few operations of a step
                    self._advance()
                self._note()
        except BaseException:
            self._stop(requests)
            self._taken(lambda request: request.number in own)
            raise
        return response_batch(self._taken(lambda request: request.number in own), sampling)

    def submit(self, prompts: Batch, sampling: Sampling, *, max_response_tokens: int, seed: int) -> None:
        requests = self._requests(prompts, sampling, max_response_tokens, seed)
        names = [request.name for request in requests]
        if len(set(names)) < len(names) or not self._submitted.keys().isdisjoint(names):
            uid, sample = next(name for name in names if name in self._submitted or names.count(name) > 1)
            raise EngineError(
                f"The row with uid {uid} and sample_index {sample} is submitted twice.",
                remedy="Poll or withdraw a row before you submit it again.",
            )
        if self._submitted and sampling != self._sampling:
            raise EngineError(
                f"Rows are submitted with {sampling}, while others run with {self._sampling}.",
                remedy="Poll or withdraw the running rows first, or call generate().",
            )
        self._sampling = sampling
        self._submitted |= {request.name: request for request in requests}
        self._begin(requests)

    def poll(self, *, max_tokens: int | None = None) -> Batch:
        self._check_ready()
        if max_tokens is not None and max_tokens < 1:
            raise EngineError(f"poll() cannot sample {max_tokens} tokens.", remedy="Use max_tokens=1 or more, or None.")
        self._check_same("poll", max_tokens)
        is_submitted = self._is_submitted
        num_steps = 0
        while self._submitted and num_steps != max_tokens:
            if any(is_submitted(request) for part in self._finished for request in part.requests):
                break
            self._advance()
            self._note()
            num_steps += 1
        return self._returned(self._taken(is_submitted))

    def withdraw(self, rows: Batch | None = None) -> Batch:
        names = list(self._submitted)
        if rows is not None:
            rows.require(("uid", "sample_index"), stage="rollout.withdraw")
            names = row_names(rows)
        if unknown := [name for name in names if name not in self._submitted]:
            raise EngineError(
                f"The row with uid {unknown[0][0]} and sample_index {unknown[0][1]} is not running.",
                remedy="Withdraw rows that were submitted and that poll() has not returned.",
            )
        self._check_same("withdraw", names)
        requests = [self._submitted[name] for name in dict.fromkeys(names)]
        self._stop(requests)
        chosen = {request.number for request in requests}
        found = self._returned(self._taken(lambda request: request.number in chosen))
        if rows is None:  # also those that an error or an interruption has lost
            for request in self._submitted.values():
                self._unfinished.pop(request.number, None)
            self._submitted.clear()
        return found

    def weight_slots(self) -> Mapping[str, WeightShard]:
        return self._slots

    def pause(self, *, keep_cache: bool = False) -> None:
        if not keep_cache:
            self._interrupt()
        self._note()
        self.is_paused = True
        self._missing = "are being written, or a transfer that wrote them failed"

    def resume(self, *, version: int) -> None:
        if not self.is_paused:
            raise EngineError("The rollout engine is not paused.", remedy="Call pause() before you write weights.")
        self.is_paused = False
        self._missing = None
        self.version = version
        for request, num_tokens in self._so_far():
            request.continue_under(version, first_token=num_tokens)

    def sleep(self, kept: Iterable[WeightShard] = ()) -> Released:
        """See `RolloutEngine.sleep`. On a GPU all weights stay."""
        self._interrupt()
        self._note()
        released = Released(0, 0, 0) if self._buffer is None else self._buffer.release(shard.tensor for shard in kept)
        if released.weight_bytes:
            self._missing = "were freed while it slept"
        self.is_asleep = True
        return released

    def wake(self) -> None:
        """See `RolloutEngine.wake`. On a CPU, pages return as they are written."""
        self.is_asleep = False

    def _check_ready(self) -> None:
        if self.is_asleep:
            raise EngineError("The rollout engine is asleep.", remedy="Call wake() before you generate.")
        if self._missing is not None:
            raise StaleWeightsError(
                f"The rollout's weights {self._missing}.",
                remedy="Publish the weights (pause, write every slot, resume) before you generate.",
            )

    def _requests(self, prompts: Batch, sampling: Sampling, max_response_tokens: int, seed: int) -> list[Request]:
        self._check_ready()
        ids = checked_prompts(prompts, max_response_tokens=max_response_tokens, limit_tokens=self._limit_tokens)
        requests = make_requests(
            prompts,
            sampling,
            max_response_tokens=max_response_tokens,
            seed=seed,
            version=self.version,
            first_number=self._next_number,
        )
        keys = [request.key for request in requests]
        self._check_same(ids.values.numpy().tobytes(), ids.offsets.tolist(), keys, sampling, max_response_tokens)
        return requests

    def _begin(self, requests: Sequence[Request]) -> None:
        self._next_number += len(requests)
        self._unfinished |= {request.number: request for request in requests}
        self._start(requests)

    def _advance(self) -> None:
        """One step of all requests. One that is interrupted leaves caches undefined, so they are computed again."""
        try:
            self._num_uncollected += self._step()
            self.num_steps += 1
        except BaseException:
            self._interrupt()
            raise
        ACTIVITY.advance()

    def _stop(self, requests: Sequence[Request]) -> None:
        """Those of the requests that are unfinished count as finished, with the tokens that they have."""
        self._note()
        if unfinished := [request for request in requests if request.number in self._unfinished]:
            self._note(self._removed(unfinished))

    def _note(self, *removed: Responses) -> None:
        """Requests that have finished are no longer unfinished."""
        for responses in (*self._collect(), *removed):
            self._finished.append(responses)
            for request in responses.requests:
                del self._unfinished[request.number]
        self._num_uncollected = 0

    def _taken(self, is_chosen: Callable[[Request], bool]) -> Responses:
        """Removes the chosen requests from those that have finished, and returns them in order."""
        taken, left = [], []
        for part in self._finished:
            flags = [is_chosen(request) for request in part.requests]
            if all(flags):
                taken.append(part)
                continue
            for target, wanted in ((taken, True), (left, False)):
                if rows := [row for row, flag in enumerate(flags) if flag is wanted]:
                    target.append(part.select(rows))
        self._finished = left
        return Responses.concat(taken)

    def _is_submitted(self, request: Request) -> bool:
        return self._submitted.get(request.name) is request

    def _returned(self, responses: Responses) -> Batch:
        """The columns of `poll`; forgets the rows."""
        for request in responses.requests:
            del self._submitted[request.name]
        names = torch.tensor([request.name for request in responses.requests], dtype=torch.int64).reshape(-1, 2)
        identity = Batch.of(rows={"uid": names[:, 0].clone(), "sample_index": names[:, 1].clone()})
        return identity.join(response_batch(responses, self._sampling))


def ends_of(sampling: Sampling, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end a response."""
    return (*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids)
