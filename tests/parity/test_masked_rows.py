"""A rank all of whose rows are masked takes part in the steps and passes of the others."""

import pickle
from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.catalogue import BY_ROWS
from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.training import Optimizer, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.worker import WorkerContext
from hybridflow.observability.metrics import Metrics, merge, plain
from hybridflow.parallel import ParallelMesh
from hybridflow.workers.actor import ActorWorker
from tests.spmd import preload, run_ranks
from tests.toys import numbers_like, sequences
from tests.unit.workers.roles import setup_of

preload("hybridflow.engines.training.megatron.engine")

ROWS = [[0, 1, 4], [2, 3, 5]]
MINIBATCHES = (2, 1)
MASKED = [1, 2, 3, 5]
"""All rows of the second rank."""

Learned = tuple[Metrics, torch.Tensor]


def samples() -> Batch:
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=3)
    ids, mask = batch.tokens("response_ids"), batch.tokens("response_mask")
    is_masked = torch.zeros(6, dtype=torch.bool)
    is_masked[MASKED] = True
    kept = mask.values * ~is_masked.repeat_interleave(ids.lengths)
    old = numbers_like(ids, seed=4, scale=0.3)
    tokens = {"old_logprobs": old.like(old.values - 4.0), "advantages": numbers_like(ids, seed=5)}
    return batch.with_columns(tokens={"response_mask": mask.like(kept)} | tokens)


def learned(directory: Path, rank: int, ranks: int, engine: TrainingEngine, batch: Batch) -> Learned:
    """The metrics of an update, and what the policy then says of the rank's rows."""
    context = WorkerContext(
        "actor", rank, mesh=ParallelMesh({"data": ranks}), rendezvous=Rendezvous(rank=rank, world_size=ranks)
    )
    setup = setup_of(directory, minibatch_sequences=4, engine=engine, optimizer=Optimizer(epsilon=1e-3))
    algorithm = Algorithm(advantage="grpo", aggregation=BY_ROWS, entropy_coefficient=0.1)
    worker = ActorWorker(context, setup=setup, algorithm=algorithm, rollout=None)
    metrics = worker.update(batch)
    return metrics, worker.logprobs(batch).tokens("old_logprobs").values


def of_rank(rank: int, directory: Path, engine: TrainingEngine) -> bytes:
    batch = samples().select(ROWS[rank]).with_columns(meta={"minibatch_rows": MINIBATCHES})
    return pickle.dumps(learned(directory, rank, len(ROWS), engine, batch))


@pytest.mark.parametrize(
    "engine", [TrainingEngine.fsdp, pytest.param(TrainingEngine.megatron, marks=pytest.mark.megatron)]
)
def test_a_rank_with_only_masked_rows_learns_with_the_others(toy_dir, engine):
    directory = toy_dir(num_key_value_heads=2)
    expected, outputs = learned(directory, 0, 1, TrainingEngine.single, samples())
    answers: list[Learned] = [pickle.loads(answer) for answer in run_ranks(of_rank, len(ROWS), directory, engine)]
    found, wanted = plain(merge(metrics for metrics, _ in answers)), plain(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert abs(found[name] - value) < 1e-4 * max(1.0, abs(value)), name  # float32 sums in another order
    said = samples().tokens("response_ids")
    rows = {
        row: values
        for rows, (_, all_values) in zip(ROWS, answers, strict=True)
        for row, values in zip(rows, said.select(torch.tensor(rows)).like(all_values).rows(), strict=True)
    }
    for row, values in enumerate(said.like(outputs).rows()):
        assert torch.allclose(rows[row], values, atol=1e-4)
        assert bool(values.any()) == (row not in MASKED)
