"""Measured calls of the engines: forward passes, updates and generations of small models."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.calibration.processes import Place
from hybridflow.calibration.rates import timed
from hybridflow.config.derived import training_mesh
from hybridflow.config.model import Dtype, Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.rollout import Rollout, Sampling
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.rollout.factory import make_rollout_engine
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.engines.traits import TRAINING_ENGINES
from hybridflow.mapping.fitting import Observation
from hybridflow.mapping.layouts import ModelUse, RolloutLayout, TrainingLayout
from hybridflow.mapping.operations import OperationKind
from hybridflow.mapping.workload import Lengths, Workload
from hybridflow.models.geometry import read_geometry, value_bytes
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh

_REPEATS = 4
_OPTIMIZER_STEPS = 100
_NO_END = (-1,)
"""No token ends a response."""


@dataclass(frozen=True)
class Rows:
    """The rows of a measured call on each process: equal prompts and equal responses."""

    count: int
    prompt: int
    response: int

    def workload(self, size: int) -> Workload:
        """The rows of all processes."""
        return Workload(self.count * size, Lengths.constant(self.prompt), Lengths.constant(self.response), 1)

    def batch(self, place: Place, vocabulary: int) -> Batch:
        """Random rows for one process."""
        generator = torch.Generator().manual_seed(place.rank)

        def tokens(length: int) -> Ragged:
            rows = torch.randint(2, vocabulary, (self.count, length), generator=generator)
            return Ragged.from_rows(list(rows), torch.int64)

        ids = tokens(self.response)
        numbers = torch.arange(self.count) + place.rank * self.count
        mask = ids.like(torch.ones(len(ids.values)))
        return Batch.of(
            rows={"uid": numbers, "sample_index": torch.zeros_like(numbers)},
            tokens={"prompt_ids": tokens(self.prompt), "response_ids": ids, "response_mask": mask},
        )


def _likelihood(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
    return Loss(-(outputs["logprobs"] * columns["response_mask"]).mean(), {})


def training_calls(
    place: Place, engine: TrainingEngine, directory: Path, rows: Sequence[Rows], *, shares_model: bool = True
) -> list[Observation]:
    """A forward pass and an update of each of `rows`, data-parallel over all processes.

    With `shares_model=False`, each process trains a model of its own at the same time.
    """
    size = place.size if shares_model else 1
    traits, on_gpu = TRAINING_ENGINES[engine], place.device.type == "cuda"
    traits.set_environment()
    dtype = Dtype.bfloat16 if on_gpu else Dtype.float32
    made = make_language_engine(
        Model(path=str(directory), dtype=dtype),
        Training(engine=engine, gradient_checkpointing=on_gpu),
        total_optimizer_steps=_OPTIMIZER_STEPS,
        device=place.device,
        ranks=Ranks(place.rank if shares_model else 0, ParallelMesh(training_mesh(Parallelism(), size))),
    )
    geometry = read_geometry(directory)
    use = ModelUse(geometry, value_bytes(dtype), is_trained=True)
    layout = TrainingLayout(engine=engine, data=size, gradient_checkpointing=on_gpu)
    loss = LossFn(("logprobs",), _likelihood)
    found = []
    for each in rows:
        batch = each.batch(place, geometry.vocab)
        calls: dict[OperationKind, Callable[[], object]] = {
            OperationKind.forward: lambda own=batch: made.forward(own, ("logprobs",), temperature=1.0),
            OperationKind.update: lambda own=batch: made.train_step(own, loss, temperature=1.0),
        }
        for kind, call in calls.items():
            seconds = min(timed(place, call, repeats=_REPEATS, waits=shares_model))
            found.append(Observation(kind, use, layout, each.workload(size), seconds))
    return found


def generations(place: Place, engine: str, directory: Path, rows: Sequence[Rows]) -> list[Observation]:
    """A generation of each of `rows` on one process."""
    dtype = Dtype.bfloat16 if place.device.type == "cuda" else Dtype.float32
    geometry = read_geometry(directory)
    made = make_rollout_engine(
        Model(path=str(directory), dtype=dtype),
        Rollout(engine=engine, max_sequences=max(each.count for each in rows)),
        limit_tokens=max(each.prompt + each.response for each in rows),
        eos_token_ids=_NO_END,
        device=place.device,
    )
    use = ModelUse(geometry, value_bytes(dtype), is_trained=False)
    return list(_generated(place, made, engine, use, rows))


def _generated(place: Place, made, engine: str, use: ModelUse, rows: Sequence[Rows]) -> Iterator[Observation]:
    for each in rows:
        prompts = each.batch(place, use.geometry.vocab).only(["uid", "sample_index", "prompt_ids"])

        def generate(own: Batch = prompts, limit: int = each.response) -> Batch:
            return made.generate(own, Sampling(ignore_eos=True), max_response_tokens=limit, seed=0)

        seconds = min(timed(place, generate, repeats=_REPEATS))
        layout = RolloutLayout(engine=engine, max_sequences=each.count)
        yield Observation(OperationKind.generate, use, layout, each.workload(1), seconds)
