"""Shared by all training engines: an optimizer created on first use, its steps, offloading and checkpoints."""

# pyright: reportPrivateImportUsage=false

import logging
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.training import MICROBATCH_TOKENS
from hybridflow.engines.training.guards import StepGuards
from hybridflow.engines.training.host_memory import HostPool
from hybridflow.engines.training.interface import Part, Snapshot
from hybridflow.engines.training.kept_state import packed, unpack
from hybridflow.engines.training.microbatch import MicroBatch, make_microbatches
from hybridflow.engines.training.optimizer import learning_rate
from hybridflow.engines.training.setup import EngineSetup
from hybridflow.engines.training.state_files import (
    FIRST_MOMENT,
    SteppedTensor,
    add_moments,
    load_optimizer,
    load_weights,
    plan_state,
    plan_weights,
    set_steps,
    state_shards,
)
from hybridflow.errors import NumericError
from hybridflow.models.adapters.files import ADAPTER_DIRECTORY, is_trained, load_adapter
from hybridflow.models.adapters.lora import Adapter
from hybridflow.models.shard_files import PlannedDirectory
from hybridflow.observability.metrics import Metrics, last, mean
from hybridflow.parallel.collectives import Together
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

_SPARE_FRACTION = 0.1
"""The fraction of a node's memory that copies leave free; Ray ends processes when 95% is used."""


class OffloadedOptimizer(Protocol):
    """An optimizer whose state can be in host memory between steps."""

    def offload(self, pool: HostPool) -> None:
        """Moves the state to the host; each step then brings it to the device bucket by bucket."""
        ...

    def onload(self) -> None:
        """Moves the state to the device until the next `offload`."""
        ...

    def settle(self) -> None:
        """Moves state that was just created or loaded to where the rest of the state is (host or device)."""
        ...


OptimizerT = TypeVar("OptimizerT", bound=OffloadedOptimizer)


class EngineShell(ABC, Generic[OptimizerT]):
    """The part of a `TrainEngine` that does not depend on the engine; each engine inherits from it.

    It has the optimizer, the number of steps taken, and which parts are offloaded to the host (`away`). An engine's
    methods begin with `onload(Part.parameters)`, and its `train_step` ends with `optimizer_step`.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.mesh: ParallelMesh = setup.ranks.mesh
        self.device = setup.device
        self.pool = setup.pool()
        self.away = {Part.optimizer} if setup.training.offload_optimizer else set[Part]()
        self.steps = 0
        self.made_optimizer: OptimizerT | None = None
        self.adapter: Adapter | None = None
        self._is_packed = True
        """Whether the model runs on packed sequences, not on padded ones."""

        self._setup = setup
        self._training = setup.training
        self._guards = StepGuards(setup.training.guards, setup.ranks)

    @abstractmethod
    def _make_optimizer(self) -> OptimizerT:
        """The optimizer, with its state on the device."""

    @abstractmethod
    def _move_parameters(self, pool: HostPool, *, away: bool) -> None:
        """Moves the parameters to the host (`away`) or back, except those that a rollout engine shares."""

    @abstractmethod
    def _held_shards(self) -> Iterator[WeightShard]:
        """The weights that this rank holds; an adapter's are not merged."""

    @abstractmethod
    def _stepped_tensors(self) -> Iterable[SteppedTensor]:
        """The tensors that the optimizer steps on this rank."""

    @property
    def _num_replicas(self) -> int:
        """The number of ranks along `data` that hold the same weights."""
        return self.mesh.axis_size("data")

    @property
    def optimizer(self) -> OptimizerT:
        """Created on first use (a frozen model never has one), and offloaded if its state is."""
        if self.made_optimizer is None:
            self.made_optimizer = self._make_optimizer()
            if Part.optimizer in self.away:
                self._move({Part.optimizer}, away=True)
        return self.made_optimizer

    def optimizer_step(self, norm: float, step: Callable[[float], None], metrics: Metrics) -> Metrics:
        """The metrics with those of one optimizer step, `step(learning rate)`, unless the guards skip it.

        Raises `NumericError` if they find a fault, such as a gradient that is not finite.
        """
        total = self._setup.total_optimizer_steps
        rate = learning_rate(self.steps, optimizer=self._training.optimizer, total_steps=total)
        number = self.steps + 1
        if self._num_replicas > 1:
            metrics |= self._guards.compare_replicas(self._held_shards(), number)
        if self._guards.admit(number, norm, metrics):
            step(rate)
            self.steps = number
        finite = {"grad_norm": mean(norm)} if math.isfinite(norm) else {}
        return metrics | finite | {"lr": last(rate)}

    def offload(self, *parts: Part) -> None:
        self._move(set(parts) - self.away, away=True)
        self.away |= set(parts)

    def onload(self, *parts: Part) -> None:
        """See `TrainEngine.onload`. Methods onload the parts that they need."""
        self._move(set(parts) & self.away, away=False)
        self.away -= set(parts)

    def save(self, directory: Path) -> None:
        with self._weights_on_device():
            parts = self._planned(directory)
            with Together(self._setup.ranks):
                _write(parts)

    def save_later(self, directory: Path) -> Callable[[], None]:
        with self._weights_on_device():
            parts = self._planned(directory)
            needed = sum(part.num_bytes for part in parts) * self._setup.ranks.mesh.size
            free = psutil.virtual_memory().available - _SPARE_FRACTION * psutil.virtual_memory().total
            if needed < free:
                parts = [part.copied() for part in parts]
            else:
                logger.warning(
                    "%s is written before training continues: copies need %.1f GiB of host memory, but %.1f GiB are"
                    " free. Set trainer.async_save=false to write all checkpoints this way",
                    directory, needed / 2**30, max(0.0, free) / 2**30,
                )  # fmt: skip
                _write(parts)
                parts = []
        return partial(_write, parts)

    def _planned(self, directory: Path) -> list[PlannedDirectory]:
        """The directories of a checkpoint, planned with all ranks."""
        ranks = self._setup.ranks
        check_finite(self._held_shards(), ranks)
        state = state_shards(self._stepped_tensors())
        return [*self._plan_weights(directory), plan_state(directory, state, self.steps, ranks)]

    def load(self, directory: Path) -> None:
        with self._weights_on_device():
            self._load_weights(directory)
            own = [shard for shard in self._held_shards() if shard.tensor.dtype is torch.float32]
            stepped = [*self._stepped_tensors()]
            self.steps = load_optimizer(directory, stepped, self._setup.ranks, own_copies=own)
            self.optimizer.settle()

    def snapshot(self) -> Snapshot:
        with self._weights_on_device():
            stepped = [*self._stepped_tensors()]
            return Snapshot(packed(self._all_tensors(stepped)), self.steps, _have_moments(stepped))

    def roll_back(self, kept: Snapshot) -> None:
        with self._weights_on_device():
            stepped = [*self._stepped_tensors()]
            if kept.has_moments:
                add_moments(stepped)
            else:
                for each in stepped:
                    each.state.clear()
            unpack(kept.data, self._all_tensors(stepped))
            self.steps = kept.steps
            if kept.has_moments:
                set_steps(stepped, kept.steps)
                self.optimizer.settle()

    def _all_tensors(self, stepped: Sequence[SteppedTensor]) -> Iterator[Tensor]:
        """Everything that a checkpoint holds of this rank; without the frozen weights of a model with an adapter."""
        held = (shard for shard in self._held_shards() if self.adapter is None or is_trained(shard.name))
        yield from (shard.tensor.detach() for shard in held)
        yield from (shard.tensor for _, shard in state_shards(stepped))

    def _microbatches(
        self, batch: Batch, *, multiple_of: int = 1, in_step: bool = False, rounds_of: int = 1
    ) -> list[MicroBatch]:
        """The batch's microbatches, at least one, each of a multiple of `multiple_of` tokens.

        Dummies fill them up to the largest number on any data-parallel rank (`in_step`), and to whole rounds of
        `rounds_of` microbatches.
        """
        make = partial(
            make_microbatches,
            batch,
            budget_tokens=self._training.microbatch_tokens or MICROBATCH_TOKENS[self.device.type],
            device=self.device,
            multiple_of=multiple_of,
            shares_prefixes=self._training.share_prefixes and self._is_packed,
        )
        own = make(at_least=1)
        most = self._setup.ranks.maximum(len(own), "data") if in_step else len(own)
        wanted = -(-most // rounds_of) * rounds_of
        return own if len(own) == wanted else make(at_least=wanted)

    def _bindable(self, slots: Mapping[str, WeightShard]) -> dict[str, WeightShard]:
        """The slots of weights without an adapter; merged weights are computed for each transfer instead."""
        merged = self.adapter.adapted if self.adapter else frozenset()
        return {name: slot for name, slot in slots.items() if name not in merged}

    def _plan_weights(self, directory: Path) -> list[PlannedDirectory]:
        """The directory of the weights that all ranks hold: only the adapter's, if there is one."""
        setup, held = self._setup, self._held_shards()
        if self.adapter is not None:
            return [setup.plan_adapter(self.adapter, held, directory)]
        return [plan_weights(directory, held, setup.ranks, write_rest=setup.describe)]

    def _load_weights(self, directory: Path) -> None:
        if self.adapter is not None:
            load_adapter(self.adapter, self._held_shards(), directory / ADAPTER_DIRECTORY)
        else:
            load_weights(directory, self._held_shards(), self._setup.ranks)

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Brings the weights to the device for a block, and moves them back afterwards if they were away.

        The optimizer's state stays where it is: the device may not have room for both.
        """
        leaving = {Part.parameters} & self.away
        self.onload(Part.parameters)
        try:
            yield
        finally:
            self.offload(*leaving)

    def _move(self, parts: set[Part], *, away: bool) -> None:
        if self.pool is None:
            return
        if Part.parameters in parts:
            self._move_parameters(self.pool, away=away)
        if Part.optimizer in parts and self.made_optimizer is not None:
            if away:
                self.made_optimizer.offload(self.pool)
            else:
                self.made_optimizer.onload()


def _write(parts: Iterable[PlannedDirectory]) -> None:
    for part in parts:
        part.write()


def _have_moments(stepped: Sequence[SteppedTensor]) -> bool:
    return all(FIRST_MOMENT in each.state for each in stepped)


def check_finite(shards: Iterable[WeightShard], ranks: Ranks) -> None:
    """Raises `NumericError` on all ranks if any rank holds a weight with NaN or infinity; called on all ranks together.

    A run would resume from a checkpoint with NaN again and again.
    """
    with Together(ranks):
        bad = non_finite(shards)
        if bad:
            others = f" and {len(bad) - 1} other weights" if len(bad) > 1 else ""
            raise NumericError(
                f"The weight '{bad[0]}'{others} became NaN or infinite in training: nothing was saved at this step.",
                remedy="Lower the role's optimizer.learning_rate (or set optimizer.max_grad_norm). Earlier checkpoints"
                " are untouched: trainer.resume=auto, the default, resumes from the last one.",
            )


@torch.no_grad()
def non_finite(shards: Iterable[WeightShard]) -> list[str]:
    """The names of the weights with NaN or infinity in the pieces that this rank holds.

    One fused reduction per dtype, and one synchronization with the device.
    """
    by_format: dict[torch.dtype, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for shard in shards:
        if shard.tensor.is_floating_point() and shard.tensor.numel():
            by_format[shard.tensor.dtype][shard.name].append(shard.tensor.detach())
    names, largest = [], []
    for named in by_format.values():
        names += [name for name, pieces in named.items() for _ in pieces]
        norms = torch._foreach_norm([piece for pieces in named.values() for piece in pieces], torch.inf)
        largest += [norm.float() for norm in norms]
    if not largest:
        return []
    finite = torch.stack(largest).isfinite().tolist()
    return list(dict.fromkeys(name for name, is_finite in zip(names, finite, strict=True) if not is_finite))
