"""Supervised steps on two ranks of each engine, against one device: conversations whose replies alone are learnt."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm
from hybridflow.config.placement import Parallelism
from hybridflow.config.training import Optimizer, TrainingEngine
from hybridflow.controller.rendezvous import Rendezvous
from hybridflow.controller.worker import WorkerContext
from hybridflow.parallel import ParallelMesh
from hybridflow.workers.actor import ActorWorker
from tests.spmd import preload, run_ranks
from tests.toys import sequences
from tests.unit.workers.roles import setup_of

preload("hybridflow.workers.actor")

STEPS = 2
FSDP, MEGATRON = TrainingEngine.fsdp, TrainingEngine.megatron
LAYOUTS = [
    pytest.param(FSDP, {}, id="fsdp"),
    pytest.param(MEGATRON, {"tensor": 2}, id="megatron-tensor", marks=pytest.mark.megatron),
    pytest.param(MEGATRON, {"pipeline": 2}, id="megatron-pipeline", marks=pytest.mark.megatron),
]
NAMES = ("train/loss", "actor/grad_norm")


def conversations() -> Batch:
    """Six rows of which two thirds of the tokens are learnt, and every row some."""
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=3)
    ids = batch.tokens("response_ids")
    mask = torch.cat([(torch.arange(int(length)) % 3 != 1).float() for length in ids.lengths])
    return batch.with_columns(tokens={"response_mask": ids.like(mask)})


def imitated(rank: int, directory: Path, engine: TrainingEngine, sizes: dict[str, int], ranks: int) -> list[dict]:
    """Metrics of each step, and of the rows when all is done."""
    data = ranks // (sizes.get("tensor", 1) * sizes.get("pipeline", 1))
    mesh = ParallelMesh({"data": data, "pipeline": sizes.get("pipeline", 1), "tensor": sizes.get("tensor", 1)})
    context = WorkerContext("actor", rank, mesh=mesh, rendezvous=Rendezvous(rank=rank, world_size=ranks))
    setup = setup_of(
        directory,
        minibatch_sequences=6,
        engine=engine,
        parallelism=Parallelism(**sizes),
        optimizer=Optimizer(learning_rate=1e-2, epsilon=1e-3),
        microbatch_tokens=24,
    )
    worker = ActorWorker(context, setup=setup, algorithm=Algorithm(), rollout=None)
    batch = conversations()
    if data > 1:
        batch = batch.slice(*((0, 4), (4, 6))[rank])  # unequal shares
        batch = batch.with_columns(meta={"minibatch_rows": (len(batch),)})
    steps = [worker.supervised_step(batch) for _ in range(STEPS)]
    numbers_of_steps = [{name: (metrics[name].value,) for name in NAMES} for metrics in steps]
    held_out = worker.evaluate(batch)["train/loss"]
    return [*numbers_of_steps, {"held_out": (held_out.value, held_out.reduction.value)}]


def over_ranks(answers: list[list[dict]]) -> list[float]:
    """What the driver makes of the ranks' metrics: averages of steps, and the sum of their parts of a loss."""
    numbers = []
    for step in range(STEPS):
        numbers += [
            sum(numbers_of_steps[step][name][0] for numbers_of_steps in answers) / len(answers) for name in NAMES
        ]
    return [*numbers, sum(numbers_of_steps[-1]["held_out"][0] for numbers_of_steps in answers)]


@pytest.mark.parametrize(("engine", "sizes"), LAYOUTS)
def test_two_ranks_imitate_as_one_device_does(toy_dir, engine, sizes):
    directory = toy_dir(num_key_value_heads=2)
    expected = over_ranks([imitated(0, directory, TrainingEngine.single, {}, 1)])
    answers = run_ranks(imitated, 2, directory, engine, sizes, 2)
    if engine is MEGATRON:
        answers = answers[-1:]  # one answer of each data rank: the last stage's
    assert over_ranks(answers) == pytest.approx(expected, rel=1e-4)  # float32 sums in another order
