"""What every training engine can do."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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


LossFn = Callable[[TokenOutputs, Mapping[str, Tensor]], Loss]
"""From a micro-batch's outputs and its columns (token columns right-padded [B, R], row columns [B]) to its loss."""


class TrainEngine(Protocol):
    """A model and its optimizer, spread over the ranks of `mesh`."""

    mesh: ParallelMesh

    def forward(self, batch: Batch) -> Batch:
        """Token columns `logprobs` and `entropy`, or `values`, of the batch's responses; no gradient."""
        ...

    def train_step(self, batch: Batch, loss_fn: LossFn) -> Metrics:
        """One optimizer step on the batch, in micro-batches whose losses add up."""
        ...

    def weight_shards(self) -> Iterator[WeightShard]:
        """Every weight this rank holds, under its canonical name, without communication or copy."""
        ...

    def bind(self, slots: Mapping[str, WeightShard]) -> set[str]:
        """Turns parameters into views of the slots (which take their values); returns the names it could bind."""
        ...

    def save(self, directory: Path) -> None:
        """Writes a Hugging Face directory and the optimizer's state."""
        ...

    def load(self, directory: Path) -> None:
        """Reads what `save` wrote, in place, so that bound parameters stay bound."""
        ...
