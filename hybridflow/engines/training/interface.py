"""The interface of training engines."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol

from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.observability.metrics import Metrics
from hybridflow.parallel.layout import WeightShard
from hybridflow.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class Loss:
    """A scalar loss, already divided by the global denominators, and its metrics."""

    value: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class LossFn:
    """A loss of microbatches, and the model outputs that it reads; an engine computes only those.

        loss_fn = LossFn(("logprobs",), lambda outputs, columns: Loss(-outputs["logprobs"].sum(), {}))

    It is called with the outputs by name, right-padded [B, R], and the microbatch's columns (token columns
    right-padded [B, R], row columns [B]). Rows in which all columns in `masks` are 0 do not affect the loss, and may be
    left out; without `masks`, no row may.
    """

    outputs: tuple[str, ...]
    function: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Loss]
    masks: tuple[str, ...] = ()

    def __call__(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        """The loss of a microbatch."""
        return self.function(outputs, columns)


class Part(Enum):
    """A part of an engine that can be offloaded to host memory."""

    parameters = "parameters"
    optimizer = "optimizer"


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that one rank would save, in host memory."""

    data: Tensor
    """[bytes] weights, and the optimizer's state."""

    steps: int
    """Optimizer steps taken."""

    has_moments: bool
    """Whether the optimizer has been used."""


class RollsBack(Protocol):
    """State that can be copied to host memory and restored from there."""

    def snapshot(self) -> Snapshot:
        """A copy of everything that this rank would save."""
        ...

    def roll_back(self, kept: Snapshot) -> None:
        """Restores a snapshot of the same rank in the same layout, in place."""
        ...


class Saves(Protocol):
    """State that all ranks write to and read from a checkpoint together."""

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory and the optimizer's state; every rank writes its own shards.

        With LoRA, writes only the adapter, in peft's format. Raises `EngineError` on all ranks, and writes nothing, if
        a weight of any rank is NaN or infinite.
        """
        ...

    def save_later(self, directory: Path) -> Callable[[], None]:
        """Copies what `save` writes to host memory; the returned function writes this rank's part, in any thread.

        Writes at once if the host lacks memory for the copies, and the weights of a model without known names.
        """
        ...

    def load(self, directory: Path) -> None:
        """Reads a checkpoint of any engine in any layout, in place, so that bound parameters stay bound."""
        ...


class TrainEngine(RollsBack, Saves, Protocol):
    """A model and its optimizer, sharded over the ranks of `mesh`; every method is called on all ranks together.

    Only ranks that differ in `data` get different rows: the same number of optimizer steps, but not necessarily of
    rows. Losses are divided by the denominators of all rows, so gradients are summed over `data`, not averaged.

    A language model has the outputs `logprobs`, `entropy` and `sum_pi_squared`, each of softmax(logits / temperature),
    in float32. A value model has `values`, and ignores the temperature.
    """

    mesh: ParallelMesh

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        """The named outputs as token columns of the batch's responses; no gradient.

        `adapted=False` disables the model's LoRA adapter, if it has one.
        """
        ...

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """One optimizer step with the summed losses of the microbatches; returns metrics of this rank's rows."""
        ...

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every weight that this rank holds, under its canonical name, without communication or copies.

        Offloaded parameters are first moved back to the device, where a transfer can read them. A weight may have
        several shards with different boxes. A tied head appears only as the embedding. With LoRA, adapted weights are
        merged each time a shard is read, and ranks that shard rows first gather the adapters.
        """
        ...

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """Makes parameters views of the slots, after copying their values there; returns the names of bound weights.

        A parameter with several weights is bound only if their slots have the same memory layout.
        """
        ...

    def offload(self, *parts: Part) -> None:
        """Moves parts to host memory, except bound parameters. On a CPU nothing moves."""
        ...

    def onload(self, *parts: Part) -> None:
        """Moves parts back to the device."""
        ...
