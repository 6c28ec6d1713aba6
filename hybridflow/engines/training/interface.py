"""What every training engine can do."""

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
    """A scalar to differentiate, already divided by the global denominators, and what to report of it."""

    value: Tensor
    metrics: Metrics


@dataclass(frozen=True)
class LossFn:
    """A loss of micro-batches, and the outputs of the model that it reads: an engine computes no others.

        loss_fn = LossFn(("logprobs",), lambda outputs, columns: Loss(-outputs["logprobs"].sum(), {}))

    It is called with the outputs by name, right-padded [B, R], and the micro-batch's columns (token columns
    right-padded [B, R], row columns [B]).
    """

    outputs: tuple[str, ...]
    function: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Loss]

    def __call__(self, outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        """The loss of a micro-batch."""
        return self.function(outputs, columns)


class Part(Enum):
    """What an engine keeps on its device, and can put into the host's memory meanwhile."""

    parameters = "parameters"
    optimizer = "optimizer"


class TrainEngine(Protocol):
    """A model and its optimizer, spread over the ranks of `mesh`; every method is called on all ranks together.

    Ranks that differ in `data` alone are given different rows (as many optimizer steps, not as many rows); all others
    the same. Losses are divided by the denominators of all rows, so gradients are summed over `data`, not averaged.

    A language model has the outputs `logprobs`, `entropy` and `sum_pi_squared`, each of softmax(logits / temperature),
    float32; a value model has `values`, and ignores the temperature. `logprobs` is always computed; the others
    only where they are named.
    """

    mesh: ParallelMesh

    def forward(self, batch: Batch, outputs: tuple[str, ...], *, temperature: float, adapted: bool = True) -> Batch:
        """The named outputs as token columns of the batch's responses; no gradient.

        Without `adapted` they are those of the model that a low-rank adapter was added to, where there is one.
        """
        ...

    def train_step(self, batch: Batch, loss_fn: LossFn, *, temperature: float) -> Metrics:
        """One optimizer step on the batch, in micro-batches whose losses add up. Metrics are of this rank's rows."""
        ...

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every weight this rank holds, under its canonical name, without communication or copy.

        Parameters that were offloaded come back to the device first, where a transfer can read them.
        A weight may come in several pieces, with different boxes. Tied weights come once, as the embedding.
        Low-rank adapters are the exception: their weights come merged, which is worked out when a shard is read, and
        ranks that divide a matrix's rows gather the adapters first.
        """
        ...

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """Turns parameters into views of the slots (which take their values); returns the names it could bind.

        A parameter that holds several weights in one tensor is bound where their slots lie alike, or not at all.
        """
        ...

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory and the optimizer's state; every rank writes what it holds.

        Of a model with a low-rank adapter, the adapter alone, in peft's format. Raises `EngineError` on all ranks, and
        writes nothing, where a weight of any rank is NaN or infinite.
        """
        ...

    def load(self, directory: Path) -> None:
        """Reads what `save` of any engine in any layout wrote, in place, so that bound parameters stay bound."""
        ...

    def offload(self, *parts: Part) -> None:
        """Moves parts to the host's memory; bound parameters stay, and on a CPU nothing moves."""
        ...

    def onload(self, *parts: Part) -> None:
        """Brings them back to the device."""
        ...
