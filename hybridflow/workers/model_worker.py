"""What all workers with a training engine share: saving, loading, passes over a batch."""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridflow.batch import Batch
from hybridflow.config.model import Model
from hybridflow.config.training import Training
from hybridflow.controller.protocols import BROADCAST
from hybridflow.controller.transfer import transfer
from hybridflow.controller.worker import Worker, WorkerContext
from hybridflow.engines.training.interface import LossFn, Part, TrainEngine
from hybridflow.engines.training.traits import traits_of
from hybridflow.errors import CheckpointError
from hybridflow.observability.metrics import Measure, Metrics, Reduction, merge
from hybridflow.parallel.collectives import Together, dealt
from hybridflow.parallel.file_records import Written, files_below, record_files, shared_out
from hybridflow.workers.reduction import sum_over_data

STATE_FILE = "worker.json"

Objective = Callable[[Batch], tuple[Batch, LossFn]]
"""From a minibatch to the batch that the engine is shown, and the loss of it."""


@dataclass(frozen=True)
class TrainingSetup:
    """What a trained role needs: its model, its section of the configuration, and the run's derived sizes."""

    model: Model
    training: Training
    minibatch_sequences: int
    total_optimizer_steps: int
    max_response_tokens: int
    temperature: float
    """Divides the logits wherever the model is asked or trained: that of the samples that it learns from."""


class ModelWorker(Worker):
    """A worker with one training engine, on one rank of it."""

    engine: TrainEngine

    def __init__(self, context: WorkerContext, setup: TrainingSetup) -> None:
        super().__init__(context)
        training = setup.training
        self.setup = setup
        traits_of(training.engine, context.mesh.size).set_environment()
        self.device = chosen_device(context)
        self.ranks = context.ranks()
        self.reduce = sum_over_data(self.ranks)
        offloaded = {Part.parameters: training.offload_parameters, Part.optimizer: training.offload_optimizer}
        self._waiting = tuple(part for part, is_offloaded in offloaded.items() if is_offloaded)

    def started(self, make: Callable[..., TrainEngine]) -> TrainEngine:
        """The engine that `make` (of engines/training/factory.py) makes of the role's setup, on this rank."""
        return make(
            self.setup.model,
            self.setup.training,
            total_optimizer_steps=self.setup.total_optimizer_steps,
            device=self.device,
            ranks=self.ranks,
        )

    @transfer(BROADCAST, changes=False)
    def save(self, directory: Path) -> Written:
        """Writes the model, its optimizer and the worker's state to `directory/<role>`, which all ranks share.

        Answers the files that this rank hashed: once all ranks have written, they divide the files among themselves.
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
        mine = dealt(shared_out(sizes, self.ranks.mesh.size), self.ranks)
        records = record_files(target, mine, threads=self.context.threads)
        return Written({f"{self.context.role}/{name}": record for name, record in records.items()})

    @transfer(BROADCAST)
    def load(self, directory: Path) -> None:
        """Reads what `save` wrote."""
        source = directory / self.context.role
        self.engine.load(source)
        self.rest()
        self.restore(json.loads((source / STATE_FILE).read_text()))

    def state(self) -> dict[str, float]:
        """What the worker itself must remember over a restart."""
        return {}

    def restore(self, state: dict[str, float]) -> None:
        """Puts back what `state` gave."""

    def predict(self, batch: Batch, *outputs: str, adapted: bool = True) -> Batch:
        """The model's named outputs for a batch, as token columns; `adapted=False` leaves its adapter out."""
        predicted = self.engine.forward(batch, outputs, temperature=self.setup.temperature, adapted=adapted)
        self.rest()
        return predicted

    def train(self, batch: Batch, objective: Objective, *, prefix: str) -> Metrics:
        """Passes over the batch in minibatches, one optimizer step each; engine metrics get the role's prefix.

        The objective gives the minibatch as the engine is to see it, and its loss.
        """
        reports, num_ranks = [], self.ranks.mesh.axis_size("data")
        rows = minibatch_rows(batch, self.setup.minibatch_sequences)
        for minibatch in _minibatches(batch, rows, self.setup.training.epochs):
            metrics = self.engine.train_step(*objective(minibatch), temperature=self.setup.temperature)
            reports.append({_named(n, prefix): _over_steps(m, num_ranks) for n, m in metrics.items()})
        self.rest()
        return merge(reports)

    def rest(self) -> None:
        """Between calls weights and optimizer state wait in the host's memory, where the configuration says so."""
        self.engine.offload(*self._waiting)


def _make(target: Path) -> None:
    """Makes a role's directory in that of a checkpoint, which the driver has made where all ranks can see it."""
    try:
        target.mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{socket.gethostname()} does not see {target.parent}, which the driver has made.",
            remedy="Set trainer.run_dir to a directory that every node of the run shares.",
        ) from error


def chosen_device(context: WorkerContext) -> torch.device:
    """The worker's device, made the default device of libraries."""
    device = torch.device(context.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def num_minibatches(batch: Batch, size: int) -> int:
    """Optimizer steps that an epoch over the batch takes."""
    return len(minibatch_rows(batch, size))


def minibatch_rows(batch: Batch, size: int) -> Sequence[int]:
    """Rows of each minibatch: as the driver divided them over ranks, or so many of a batch that came whole."""
    given = batch.meta.get("minibatch_rows")
    if isinstance(given, tuple):
        return given
    return [min(size, len(batch) - start) for start in range(0, len(batch), size)]


def _minibatches(batch: Batch, rows: Sequence[int], epochs: int) -> Iterator[Batch]:
    """Consecutive rows: siblings stay together, and each epoch sees the same minibatches."""
    for _ in range(epochs):
        start = 0
        for count in rows:
            yield batch.slice(start, start + count)
            start += count


def _named(name: str, prefix: str) -> str:
    return name if "/" in name else f"{prefix}/{name}"


def _over_steps(measure: Measure, num_ranks: int) -> Measure:
    """A loss adds up over the data-parallel ranks within an optimizer step, and is averaged over steps.

    The averages of the ranks are averaged by the driver in their turn: so many times the share of a rank makes the sum.
    """
    if measure.reduction is not Reduction.sum:
        return measure
    return replace(measure, value=measure.value * num_ranks, reduction=Reduction.mean)
