"""Workers with a training engine: checkpoints, predictions, and passes over a batch."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.batch.balance import balanced_groups
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.model import Model
from hybridflow.config.training import Training
from hybridflow.controller.protocols import BROADCAST
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.interface import LossFn, Part, TrainEngine
from hybridflow.engines.traits import traits_of
from hybridflow.errors import CheckpointError
from hybridflow.observability.metrics import Measure, Metrics, Reduction, merge
from hybridflow.parallel.collectives import Together, scatter_json
from hybridflow.parallel.file_records import WrittenFiles, files_below, record_files

STATE_FILE = "worker.json"

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
    def save(self, directory: Path) -> WrittenFiles:
        """Writes the model, its optimizer and the worker's state to `directory/<role>`, which all ranks share.

        Returns the records of the files that this rank hashed: after writing, the ranks divide the hashing.
        """
        target = directory / self.context.role
        with Together(self.ranks):
            _make(target)
        self.engine.save(target)
        self.rest()
        sizes: dict[str, int] = {}
        with Together(self.ranks):
            if self.context.rank == 0:
                (target / STATE_FILE).write_text(json.dumps(self.state()))
                sizes = files_below(target)
        names = list(sizes)
        shares = balanced_groups(range(len(names)), list(sizes.values()), self.ranks.mesh.size)
        mine = scatter_json([[names[file] for file in share] for share in shares], self.ranks)
        records = record_files(target, mine, threads=self.context.threads)
        return WrittenFiles({f"{self.context.role}/{name}": record for name, record in records.items()})

    @transfer(BROADCAST)
    def load(self, directory: Path) -> None:
        source = directory / self.context.role
        self.engine.load(source)
        self.rest()
        self.restore(json.loads((source / STATE_FILE).read_text()))

    def state(self) -> dict[str, float]:
        """The worker's own state for a checkpoint."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Restores what `state` returned."""

    def predict(self, batch: Batch, *outputs: str, adapted: bool = True) -> Batch:
        """The named outputs of a forward pass, as token columns; `adapted=False` disables the low-rank adapter."""
        found = self.engine.forward(batch, outputs, temperature=self.setup.temperature, adapted=adapted)
        self.rest()
        return found

    def train(self, batch: Batch, objective: Objective, *, prefix: str) -> Metrics:
        """Passes over the batch, one optimizer step per minibatch; `prefix` goes before the engine's metrics."""
        reports, num_ranks = [], self.ranks.mesh.axis_size("data")
        rows = minibatch_rows(batch, self.setup.minibatch_sequences)
        for minibatch in _minibatches(batch, rows, self.setup.training.epochs):
            metrics = self.engine.train_step(*objective(minibatch), temperature=self.setup.temperature)
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
    return replace(measure, value=measure.value * num_ranks, reduction=Reduction.mean)
