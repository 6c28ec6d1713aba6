"""PPO-ptx on two ranks: samples and texts in unequal shares give the optimizer steps of one device."""

import pickle
from pathlib import Path

import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.training import Optimizer, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.worker import WorkerContext
from hybridflow.parallel import ParallelMesh
from hybridflow.workers.actor import ActorWorker
from tests.spmd import run_ranks
from tests.toys import numbers_like, sequences
from tests.unit.workers.roles import setup_of

ALGORITHM = Algorithm(advantage="grpo", pretraining_coefficient=0.7)
SAMPLES = [[0, 1, 4], [2, 3, 5]]
"""Rows of each rank: minibatches of four rows and two."""

TEXTS = [[0, 1, 3], [2, 4]]
ROWS = [((2, 1), (2, 1)), ((2, 1), (1, 1))]
"""How many of them belong to each minibatch."""

Told = tuple[dict[str, float], torch.Tensor]


def samples() -> Batch:
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=3)
    ids = batch.tokens("response_ids")
    old = numbers_like(ids, seed=4, scale=0.3)
    tokens = {"old_logprobs": old.like(old.values - 4.0), "advantages": numbers_like(ids, seed=5)}
    return batch.with_columns(tokens=tokens)


def worker_of(directory: Path, rank: int, ranks: int) -> ActorWorker:
    engine = TrainingEngine.fsdp if ranks > 1 else TrainingEngine.single
    context = WorkerContext(
        "actor", rank, mesh=ParallelMesh({"data": ranks}), rendezvous=Rendezvous(rank=rank, world_size=ranks)
    )
    setup = setup_of(directory, minibatch_sequences=4, engine=engine, optimizer=Optimizer(epsilon=1e-3))
    return ActorWorker(context, setup=setup, algorithm=ALGORITHM, rollout=None)


def learned(worker: ActorWorker, batch: Batch, texts: Batch) -> Told:
    """Metrics of an update, and what the policy then says of all samples."""
    metrics = worker.update(batch, texts)
    reported = {name: metrics[name].value for name in ("actor/pretraining_loss", "actor/pg_loss", "actor/grad_norm")}
    return reported, worker.logprobs(samples()).tokens("old_logprobs").values


def of_rank(rank: int, directory: Path) -> bytes:
    worker = worker_of(directory, rank, len(SAMPLES))
    own, others = ROWS[rank]
    batch = samples().select(SAMPLES[rank]).with_columns(meta={"minibatch_rows": own})
    texts = sequences(seed=9).select(TEXTS[rank]).with_columns(meta={"minibatch_rows": others})
    return pickle.dumps(learned(worker, batch, texts))


def test_two_ranks_learn_from_samples_and_texts_what_one_device_learns(toy_dir):
    expected, outputs = learned(worker_of(toy_dir(), 0, 1), samples(), sequences(seed=9))
    answers: list[Told] = [pickle.loads(answer) for answer in run_ranks(of_rank, len(SAMPLES), toy_dir())]
    for name, value in expected.items():
        found = sum(reported[name] for reported, _ in answers) / len(answers)
        assert abs(found - value) < 1e-4 * max(1.0, abs(value)), name  # float32 sums in another order
    for _, said in answers:
        assert float((said - outputs).abs().max()) < 1e-4
