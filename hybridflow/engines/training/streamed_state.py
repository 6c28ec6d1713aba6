"""An optimizer's state in host memory, copied to the device bucket by bucket for a step."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from hybridflow.engines.training.host_memory import HostPool, PendingCopies

_Key = tuple[Tensor, str | None]
"""A parameter of the optimizer, and the key of a tensor in its state; None is the parameter itself."""


class StreamedState:
    """The moments of an optimizer's parameters, and the parameters that are float32 copies, in host memory.

    While one bucket is stepped, the next is copied to the device and the previous one back, so that three buckets are
    on the device at once. A parameter's state is never split: if it exceeds the bucket size, it is a bucket of its own.
    Scalars that an optimizer keeps for each parameter, such as torch's step count, stay on the device.

        state = StreamedState(copies, pool)
        state.settle(optimizer)
        state.step(optimizer, lambda parameters: move(parameters))      # once per bucket, with its state on the device
        state.onload(optimizer)

    It keeps no reference to the optimizer, which may own it: a reference cycle would delay freeing its memory.
    """

    def __init__(self, copies: Collection[Tensor], pool: HostPool) -> None:
        self._copies = set(copies)
        self._pool = pool

    def settle(self, optimizer: Optimizer) -> None:
        """Moves all state to the host, wherever it is: new state, or state just loaded from a checkpoint."""
        for bucket in self._buckets(optimizer):
            _place(optimizer, self._pool.put(self._state_of(optimizer, bucket)))

    def onload(self, optimizer: Optimizer) -> None:
        """Moves all state to the device."""
        for bucket in self._buckets(optimizer):
            _place(optimizer, self._pool.take([*self._state_of(optimizer, bucket)]))

    @torch.no_grad()
    def step(self, optimizer: Optimizer, act: Callable[[Sequence[Tensor]], None]) -> None:
        """Calls `act` with the parameters of each bucket while their state is on the device.

        State that `act` creates is moved to the host with the rest. On return all state is on the host.
        """
        buckets = [*self._buckets(optimizer)]
        leaving: deque[PendingCopies] = deque()
        coming = [self._fetched(optimizer, bucket) for bucket in buckets[:1]]
        try:
            for number, bucket in enumerate(buckets):
                here, arrival = coming.pop()
                coming = [self._fetched(optimizer, following) for following in buckets[number + 1 : number + 2]]
                arrival.join()
                _place(optimizer, here)
                try:
                    act(bucket)
                finally:
                    leaving.append(self._left(optimizer, bucket))
                if len(leaving) > 1:
                    leaving.popleft().wait()
        finally:
            for copies in [*leaving, *(arrival for _, arrival in coming)]:
                copies.wait()

    def _buckets(self, optimizer: Optimizer) -> Iterator[list[Tensor]]:
        """Parameters in the order of the optimizer, in buckets of about `bucket_bytes`, at least one in each."""
        bucket: list[Tensor] = []
        size = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                num_bytes = 3 * parameter.numel() * 4
                if bucket and size + num_bytes > self._pool.link.bucket_bytes:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(parameter)
                size += num_bytes
        if bucket:
            yield bucket

    def _state_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> dict[_Key, Tensor]:
        state: dict[_Key, Tensor] = {}
        for parameter in parameters:
            if parameter in self._copies:
                state[parameter, None] = parameter.data
            kept = optimizer.state.get(parameter, {})
            state |= {(parameter, kind): tensor for kind, tensor in kept.items() if kind != "step"}
        return state

    def _fetched(self, optimizer: Optimizer, bucket: Sequence[Tensor]) -> tuple[dict[_Key, Tensor], PendingCopies]:
        return self._pool.fetch([*self._state_of(optimizer, bucket)])

    def _left(self, optimizer: Optimizer, bucket: Sequence[Tensor]) -> PendingCopies:
        """Starts to copy the bucket's state to the host, and makes the optimizer refer to it there."""
        state = self._state_of(optimizer, bucket)
        places = self._pool.reserve(state)
        copies = self._pool.link.start([(places[key], state[key]) for key in state], outward=True)
        _place(optimizer, places)
        return copies


@contextmanager
def narrowed(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[dict]]:
    """Restricts an optimizer to some parameters within the block; yields the restricted copies of its groups."""
    groups, wanted = optimizer.param_groups, set(parameters)
    narrow = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in groups]
    optimizer.param_groups = [group for group in narrow if group["params"]]
    try:
        yield optimizer.param_groups
    finally:
        optimizer.param_groups = groups


def _place(optimizer: Optimizer, state: dict[_Key, Tensor]) -> None:
    for (parameter, kind), tensor in state.items():
        if kind is None:
            parameter.data = tensor
        else:
            optimizer.state[parameter][kind] = tensor
