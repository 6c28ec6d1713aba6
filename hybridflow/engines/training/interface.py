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
class TokenOutputs:
    """What a model says of each response token, right-padded [B, R]; absent outputs are empty tensors.

    A causal model fills `logprobs` and `entropy` (of softmax(logits / temperature)), a value model `values`.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


@dataclass(frozen=True)
class Loss:
    """A scalar to differentiate, already divided by the global denominators, and what to report of it."""

    value: Tensor
    metrics: Metrics


WITH_SQUARES = "with_squares"
"""In the metadata of a batch: the sum of the squares of each token's probabilities over the vocabulary is wanted."""

LossFn = Callable[[TokenOutputs, Mapping[str, Tensor]], Loss]
"""From a micro-batch's outputs and its columns (token columns right-padded [B, R], row columns [B]) to its loss."""


class Part(Enum):
    """What an engine keeps on its device, and can put into the host's memory meanwhile."""

    parameters = "parameters"
    optimizer = "optimizer"


class TrainEngine(Protocol):
    """A model and its optimizer, spread over the ranks of `mesh`; every method is called on all ranks together.

    Ranks that differ in `data` alone are given different rows (as many optimizer steps, not as many rows); all others
    the same. Losses are divided by the denominators of all rows, so gradients are summed over `data`, not averaged.
    """

    mesh: ParallelMesh

    def forward(self, batch: Batch, *, adapted: bool = True) -> Batch:
        """Token columns `logprobs` and `entropy`, or `values`, of the batch's responses; no gradient.

        Where `batch.meta` has `WITH_SQUARES`, a language model's answer has `sum_pi_squared` as well.
        Without `adapted` they are those of the model that a low-rank adapter was added to, where there is one.
        """
        ...

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
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
