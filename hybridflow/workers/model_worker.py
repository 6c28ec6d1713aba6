"""Workers with a training engine: checkpoints, predictions, and passes over a batch."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypedDict

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Model
from hybridflow.config.training import Training
from hybridflow.controller.protocols import BROADCAST, PER_RANK
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.interface import LossFn, Part, Snapshot, TrainEngine
from hybridflow.engines.traits import traits_of
from hybridflow.errors import CheckpointError
from hybridflow.observability.metrics import Measure, Metrics, Reduction, merge
from hybridflow.parallel.collectives import Together
from hybridflow.parallel.part_records import PartWriter
from hybridflow.workers.masked_rows import predicted, rows_with_tokens


class Columns(TypedDict):
    """The columns that a method receives, as arguments of `transfer`."""

    requires: tuple[str, ...]
    optional: tuple[str, ...]


SEQUENCES: Columns = {"requires": ("prompt_ids", "response_ids"), "optional": ("response_mask", "fork_starts")}
"""The columns of a forward pass."""

STATE_FILE = "worker.json"
SNAPSHOT = "snapshot"
"""The column of a rank's state in `ModelWorker.snapshot`."""

Objective = Callable[[Batch], tuple[Batch, LossFn]]
"""Turns a minibatch into the batch that the engine reads, and its loss."""

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the data-parallel ranks, which have other rows of the same batch."""


@dataclass(frozen=True)
class TrainingSetup:
    """The settings of a trained role: its model, its section of the configuration, and the run's derived sizes."""

    model: Model
    training: Training
    minibatch_sequences: int
    total_optimizer_steps: int
    max_response_tokens: int
    temperature: float
    """Divides the logits in every forward pass: the temperature of the samples that the model learns from."""


@dataclass(frozen=True)
class TrainedRole:
    """The keyword arguments of a model being trained, which is part of checkpoints."""

    worker_class: ClassVar[type[Worker]]
    setup: TrainingSetup
    algorithm: Algorithm


class ModelWorker(Worker):
    """A worker with one training engine, on one rank of it."""

    engine: TrainEngine

    def __init__(self, context: WorkerContext, setup: TrainingSetup) -> None:
        super().__init__(context)
        training = setup.training
        self.setup = setup
        traits_of(training.engine, context.mesh.size).set_environment()
        self.device = chosen_device(context)
        self.ranks = ranks = context.ranks()
        self.reduce: Reduce = lambda tensor: ranks.sum(tensor, "data")
        offloaded = {Part.parameters: training.offload_parameters, Part.optimizer: training.offload_optimizer}
        self._writer: PartWriter | None = None
        self._waiting = tuple(part for part, is_offloaded in offloaded.items() if is_offloaded)

    def started(self, make: Callable[..., TrainEngine]) -> TrainEngine:
        """The engine that `make` (from engines/training/factory.py) builds from the role's setup, on this rank."""
        return make(
            self.setup.model,
            self.setup.training,
            total_optimizer_steps=self.setup.total_optimizer_steps,
            device=self.device,
            ranks=self.ranks,
        )

    @transfer(BROADCAST, changes=False)
    def save(self, directory: Path, in_background: bool = False) -> None:
        """Writes the model, its optimizer and the worker's state to `directory/<role>`, which all ranks share.

        In the background, it only copies them; `saved` says when they are written.
        """
        if self._writer is not None:
            self._writer.abandon()
        context, target = self.context, directory / self.context.role
        with Together(self.ranks):
            _make(target)
            if context.rank == 0:
                (target / STATE_FILE).write_text(json.dumps(self.state()))
        write = self.engine.save_later(target) if in_background else self.engine.save(target)
        self.rest()
        num_ranks = self.ranks.mesh.size
        self._writer = PartWriter(
            write, directory, context.role, rank=context.rank, num_ranks=num_ranks, threads=context.threads
        )
        self._writer.start()

    @transfer(BROADCAST, changes=False)
    def saved(self, wait: bool) -> None:
        """Raises the error with which the last `save` has failed on this rank, if it has. May wait for its end."""
        if self._writer is None:
            raise CheckpointError(
                f"The checkpoint is lost: the process of '{self.context.role}' that was writing it has ended.",
                remedy="Earlier checkpoints are intact; the next save writes a new one.",
            )
        self._writer.check(wait=wait)

    @transfer(BROADCAST)
    def load(self, directory: Path) -> None:
        source = directory / self.context.role
        self.engine.load(source)
        self.rest()
        self.restore(json.loads((source / STATE_FILE).read_text()))

    @transfer(PER_RANK, provides=(SNAPSHOT,), changes=False)
    def snapshot(self) -> Batch:
        """A copy of what `save` would write of this rank, in host memory; one row per rank."""
        kept = self.engine.snapshot()
        self.rest()
        about = json.dumps([kept.steps, kept.has_moments, self.state()])
        return Batch.of(rows={SNAPSHOT: kept.data[None]}, meta={SNAPSHOT: about})

    @transfer(PER_RANK, requires=(SNAPSHOT,))
    def roll_back(self, kept: Batch) -> None:
        """Restores a snapshot of the same rank."""
        steps, has_moments, state = json.loads(str(kept.meta[SNAPSHOT]))
        self.engine.roll_back(Snapshot(kept.row(SNAPSHOT)[0], steps, has_moments))
        self.rest()
        self.restore(state)

    def state(self) -> dict[str, float]:
        """The worker's own state for a checkpoint."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned."""

    def predict(self, batch: Batch, *outputs: str, adapted: bool = True) -> Batch:
        """The named outputs of a forward pass, as token columns; `adapted=False` disables the low-rank adapter.

        Rows whose `response_mask` is all 0 are not computed: their outputs are 0.
        """
        found = predicted(self.engine, batch, outputs, temperature=self.setup.temperature, adapted=adapted)
        self.rest()
        return found

    def train(self, batch: Batch, objective: Objective, *, prefix: str) -> Metrics:
        """Passes over the batch, one optimizer step per minibatch; `prefix` goes before the engine's metrics."""
        reports, num_ranks = [], self.ranks.mesh.axis_size("data")
        rows = minibatch_rows(batch, self.setup.minibatch_sequences)
        for minibatch in _minibatches(batch, rows, self.setup.training.epochs):
            given, loss_fn = objective(minibatch)
            counted = rows_with_tokens(given, loss_fn.masks)
            metrics = self.engine.train_step(counted, loss_fn, temperature=self.setup.temperature)
            named = {n if "/" in n else f"{prefix}/{n}": m for n, m in metrics.items()}
            reports.append({n: _over_steps(m, num_ranks) for n, m in named.items()})
        self.rest()
        return merge(reports)

    def rest(self) -> None:
        """Offloads weights and optimizer state to the CPU between calls, as configured."""
        self.engine.offload(*self._waiting)


def _make(target: Path) -> None:
    """Makes a role's directory in the checkpoint's, which the driver has made on storage that all ranks share."""
    try:
        target.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{socket.gethostname()} does not see {target.parent}, which the driver has created.",
            remedy="Set trainer.run_dir to a directory that every node of the run shares.",
        ) from error


def chosen_device(context: WorkerContext) -> torch.device:
    """The worker's device, set as the current one of CUDA."""
    device = torch.device(context.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def frozen_engine(
    make: Callable[..., TrainEngine], model: Model, training: Training, context: WorkerContext
) -> TrainEngine:
    """An engine of a model that is not trained, from `make` (from engines/training/factory.py)."""
    return make(model, training, total_optimizer_steps=0, device=chosen_device(context), ranks=context.ranks())


def minibatch_rows(batch: Batch, size: int) -> Sequence[int]:
    """Rows of each minibatch: this rank's share of each, or at most `size` of a batch that was not split over ranks."""
    given = batch.meta.get("minibatch_rows")
    if isinstance(given, tuple):
        return given
    return [min(size, len(batch) - start) for start in range(0, len(batch), size)]


def _minibatches(batch: Batch, rows: Sequence[int], epochs: int) -> Iterator[Batch]:
    """Consecutive rows: samples of a prompt stay together, and each epoch has the same minibatches."""
    for _ in range(epochs):
        start = 0
        for count in rows:
            yield batch.slice(start, start + count)
            start += count


def _over_steps(measure: Measure, num_ranks: int) -> Measure:
    """Sums are over the data-parallel ranks within an optimizer step, and averaged over steps.

    The driver averages over ranks, so each rank multiplies its part by their number.
    """
    if measure.reduction is not Reduction.sum:
        return measure
    return Measure(measure.value * num_ranks, measure.weight, Reduction.mean)
