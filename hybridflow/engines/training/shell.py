"""What all training engines do alike: an optimizer made when it is needed, its steps, offloading and checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hybridflow.engines.training.families import EngineSetup
from hybridflow.engines.training.finite_weights import check_finite
from hybridflow.engines.training.host_memory import HostShelf
from hybridflow.engines.training.interface import Part
from hybridflow.engines.training.passes import finite_norm
from hybridflow.engines.training.schedule import learning_rate
from hybridflow.engines.training.state_files import load_weights, save_weights
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, load_adapter
from hybridflow.models.adapters.lora import Adapter
from hybridflow.observability.metrics import Metrics, last, mean
from hybridflow.parallel.layout import WeightShard


class OffloadedOptimizer(Protocol):
    """An optimizer whose state can wait in the host's memory between steps."""

    def rest(self, shelf: HostShelf) -> None:
        """Takes the state to the host; each step then brings it to the device bucket by bucket."""
        ...

    def bring_back(self) -> None:
        """Takes the state to the device for good."""
        ...


class MoveParameters(Protocol):
    """Takes an engine's parameters to the host (`away`) or back; those that a rollout engine shares stay."""

    def __call__(self, shelf: HostShelf, *, away: bool) -> None: ...


OptimizerT = TypeVar("OptimizerT", bound=OffloadedOptimizer)


class EngineShell(Generic[OptimizerT]):
    """An engine's optimizer, the steps taken, and which parts are away on the host.

    shell.onload(Part.parameters)
    optimizer = shell.optimizer                     # made now: a frozen model never has one
    ...                                             # the engine's own passes; `norm` is their gradient's
    metrics |= shell.step(norm, optimizer.step_at)

    What it calls must not refer to the engine: in a reference cycle, `del engine` would not free the device's memory.
    """

    def __init__(
        self, setup: EngineSetup, *, make_optimizer: Callable[[], OptimizerT], move_parameters: MoveParameters
    ) -> None:
        self.shelf = setup.shelf()
        self.away = {Part.optimizer} if setup.training.offload_optimizer else set[Part]()
        self.steps = 0
        self.made_optimizer: OptimizerT | None = None
        self._setup = setup
        self._make_optimizer = make_optimizer
        self._move_parameters = move_parameters

    @property
    def optimizer(self) -> OptimizerT:
        """Made when first needed, and moved to where its state waits."""
        if self.made_optimizer is None:
            self.made_optimizer = self._make_optimizer()
            if Part.optimizer in self.away:
                self._move({Part.optimizer}, away=True)
        return self.made_optimizer

    def step(self, norm: float, move: Callable[[float], None]) -> Metrics:
        """One optimizer step, `move(learning rate)`. Raises `EngineError` where the gradient's norm is not finite."""
        finite_norm(norm, step=self.steps + 1)
        training, total = self._setup.training, self._setup.total_optimizer_steps
        rate = learning_rate(self.steps, optimizer=training.optimizer, total_steps=total)
        move(rate)
        self.steps += 1
        return {"grad_norm": mean(norm), "lr": last(rate)}

    def offload(self, *parts: Part) -> None:
        """See `TrainEngine.offload`."""
        self._move(set(parts) - self.away, away=True)
        self.away |= set(parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`. What a method of an engine needs comes back by itself."""
        self._move(set(parts) & self.away, away=False)
        self.away -= set(parts)

    @contextmanager
    def weights_here(self) -> Iterator[None]:
        """Meanwhile the weights are on the engine's device; if they are away now, they go back there afterwards.

        The optimizer's state stays where it is: it may not fit beside them.
        """
        leaving = {Part.parameters} & self.away
        self.onload(Part.parameters)
        try:
            yield
        finally:
            self.offload(*leaving)

    def save_weights(self, directory: Path, held: Callable[[], Iterator[WeightShard]], adapter: Adapter | None) -> None:
        """Writes what all ranks hold, after checking that it is finite: the adapter alone, where there is one."""
        check_finite(held(), self._setup.ranks)
        if adapter is not None:
            self._setup.save_adapter(adapter, held(), directory)
        else:
            save_weights(directory, held(), self._setup.ranks, write_rest=self._setup.describe)

    def load_weights(self, directory: Path, held: Iterator[WeightShard], adapter: Adapter | None) -> None:
        """Reads what `save_weights` wrote into the held weights."""
        if adapter is not None:
            load_adapter(adapter, held, directory / ADAPTER_DIRECTORY)
        else:
            load_weights(directory, held, self._setup.ranks)

    def _move(self, parts: set[Part], *, away: bool) -> None:
        if self.shelf is None:
            return
        if Part.parameters in parts:
            self._move_parameters(self.shelf, away=away)
        if Part.optimizer in parts and self.made_optimizer is not None:
            if away:
                self.made_optimizer.rest(self.shelf)
            else:
                self.made_optimizer.bring_back()
