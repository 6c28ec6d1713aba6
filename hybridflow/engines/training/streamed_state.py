"""An optimizer's state in the host's memory, which comes to the device bucket by bucket for a step."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from hybridflow.engines.training.host_memory import HostShelf, Journey

_Key = tuple[Tensor, str | None]
"""A parameter of the optimizer, and which tensor of its state; None is the parameter's own memory."""


class StreamedState:
    """The moments of an optimizer's parameters, and the parameters that are float32 copies, on the host.

    While a bucket is stepped on, the next one comes and the one before leaves, so that three buckets of the state are
    on the device at once. A parameter's state is never divided: one that is larger than a bucket is one by itself.
    Numbers that an optimizer keeps for each parameter, such as torch's count of steps, stay on the device.

        state = StreamedState(optimizer, copies, shelf)
        state.step(lambda parameters: move(parameters))      # once for each bucket, with its state on the device
        state.bring_back()
    """

    def __init__(self, optimizer: Optimizer, copies: Collection[Tensor], shelf: HostShelf) -> None:
        self._optimizer = optimizer
        self._copies = set(copies)
        self._shelf = shelf
        self.settle()

    def settle(self) -> None:
        """Puts all state where it waits, wherever it is now: new, or just filled from a checkpoint."""
        for bucket in self._buckets():
            self._place(self._shelf.put(self._state_of(bucket)))

    def bring_back(self) -> None:
        """Puts all state on the device."""
        for bucket in self._buckets():
            self._place(self._shelf.take([*self._state_of(bucket)]))

    @torch.no_grad()
    def step(self, act: Callable[[Sequence[Tensor]], None]) -> None:
        """Calls `act` with the parameters of each bucket while their state is on the device.

        State that `act` makes is taken to the host with the rest. All of it is there again on return.
        """
        buckets = [*self._buckets()]
        leaving: deque[Journey] = deque()
        coming = [self._fetched(bucket) for bucket in buckets[:1]]
        try:
            for number, bucket in enumerate(buckets):
                here, arrival = coming.pop()
                coming = [self._fetched(following) for following in buckets[number + 1 : number + 2]]
                arrival.join()
                self._place(here)
                try:
                    act(bucket)
                finally:
                    leaving.append(self._left(bucket))
                if len(leaving) > 1:
                    leaving.popleft().wait()
        finally:
            for journey in [*leaving, *(arrival for _, arrival in coming)]:
                journey.wait()

    def _buckets(self) -> Iterator[list[Tensor]]:
        """Parameters in the order of the optimizer, as many at once as the lane likes to copy; one at least."""
        bucket: list[Tensor] = []
        size = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                num_bytes = 3 * parameter.numel() * 4
                if bucket and size + num_bytes > self._shelf.lane.bucket_bytes:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(parameter)
                size += num_bytes
        if bucket:
            yield bucket

    def _state_of(self, parameters: Sequence[Tensor]) -> dict[_Key, Tensor]:
        state: dict[_Key, Tensor] = {}
        for parameter in parameters:
            if parameter in self._copies:
                state[parameter, None] = parameter.data
            kept = self._optimizer.state.get(parameter, {})
            state |= {(parameter, kind): tensor for kind, tensor in kept.items() if kind != "step"}
        return state

    def _fetched(self, bucket: Sequence[Tensor]) -> tuple[dict[_Key, Tensor], Journey]:
        return self._shelf.fetch([*self._state_of(bucket)])

    def _left(self, bucket: Sequence[Tensor]) -> Journey:
        """Begins to take the bucket's state to the host, where the optimizer finds it from now on."""
        state = self._state_of(bucket)
        places = self._shelf.reserve(state)
        journey = self._shelf.lane.start([(places[key], state[key]) for key in state], outward=True)
        self._place(places)
        return journey

    def _place(self, state: dict[_Key, Tensor]) -> None:
        for (parameter, kind), tensor in state.items():
            if kind is None:
                parameter.data = tensor
            else:
                self._optimizer.state[parameter][kind] = tensor


@contextmanager
def narrowed(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Iterator[list[dict]]:
    """Meanwhile an optimizer has these parameters alone, in copies of its groups, which are given."""
    groups, wanted = optimizer.param_groups, set(parameters)
    narrow = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in groups]
    optimizer.param_groups = [group for group in narrow if group["params"]]
    try:
        yield optimizer.param_groups
    finally:
        optimizer.param_groups = groups
