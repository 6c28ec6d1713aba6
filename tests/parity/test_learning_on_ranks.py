"""Learning from preferences and demonstrations on several ranks of every engine against one: the same numbers."""

from pathlib import Path

import pytest
import torch

from hybridflow.batch import Batch
from hybridflow.config.algorithm import Algorithm, Preference
from hybridflow.config.model import Model
from hybridflow.config.training import TrainingEngine
from hybridflow.observability.metrics import Metrics, merge, plain
from hybridflow.workers.actor import ActorWorker
from hybridflow.workers.model_worker import TrainingSetup
from tests.parity.layouts import Layout
from tests.preferences import labeled, pairs
from tests.spmd import preload, run_ranks
from tests.toys import sequences

preload("hybridflow.workers.actor")

STEPS = 2
TOLERANCE = 1e-4
"""Relative, of float32 sums in another order, through two steps; a pair torn apart changes a loss by a hundredth."""


def case(kind: str, ranks: int, engine: TrainingEngine, *, slow: bool = False, **sizes: int):
    """A case by name."""
    found = Layout(ranks, engine, sizes)
    return pytest.param(kind, found, id=f"{kind}-{found.name}", marks=found.marks(slow=slow))


CASES = [
    case("pairs", 2, TrainingEngine.fsdp),
    case("labelled", 2, TrainingEngine.fsdp),
    case("pairs", 2, TrainingEngine.megatron, tensor=2),
    case("pairs", 2, TrainingEngine.megatron, pipeline=2),
    case("replies", 2, TrainingEngine.fsdp),
    case("replies", 2, TrainingEngine.megatron, pipeline=2),
    case("replies", 2, TrainingEngine.megatron, tensor=2, slow=True),
    case("labelled", 2, TrainingEngine.megatron, tensor=2, slow=True),
    case("labelled", 2, TrainingEngine.megatron, pipeline=2, slow=True),
    case("pairs", 2, TrainingEngine.megatron, pipeline=2, virtual_pipeline=2, slow=True),
    case("labelled", 2, TrainingEngine.megatron, pipeline=2, virtual_pipeline=2, slow=True),
    case("pairs", 4, TrainingEngine.fsdp, tensor=2, slow=True),
    case("pairs", 2, TrainingEngine.fsdp, sequence=2, slow=True),
    case("pairs", 4, TrainingEngine.megatron, tensor=2, slow=True),
]


def replies() -> Batch:
    """Six rows of which two thirds of the tokens are learnt, and every row some."""
    batch = sequences((3, 1, 7, 4, 2, 5), (5, 9, 1, 4, 2, 3), seed=3)
    ids = batch.tokens("response_ids")
    mask = torch.cat([(torch.arange(int(length)) % 3 != 1).float() for length in ids.lengths])
    return batch.with_columns(tokens={"response_mask": ids.like(mask)})


BATCHES = {"pairs": pairs, "labelled": labeled, "replies": replies}


def learned(rank: int, kind: str, layout: Layout, directory: Path) -> list[Metrics]:
    """What one rank reports of steps on its rows, and of the same rows afterwards."""
    sizes = {"minibatch_sequences": 100, "total_optimizer_steps": 10, "max_response_tokens": 16}
    setup = TrainingSetup(Model(path=str(directory)), layout.training, **sizes, temperature=1.0)
    loss = "kto" if kind == "labelled" else "sigmoid"
    algorithm = Algorithm(preference=Preference(loss=loss, imitation=0.3))
    worker = ActorWorker(layout.context("actor", rank), setup=setup, algorithm=algorithm, rollout=None)
    rows = layout.own_pairs(BATCHES[kind](), rank)
    rows = rows.with_columns(meta={"minibatch_rows": (len(rows),)})
    step = worker.supervised_step if kind == "replies" else worker.preference_step
    return [*(step(rows) for _ in range(STEPS)), worker.evaluate(rows)]


def together(answers: list[list[Metrics]], layout: Layout) -> list[dict[str, float]]:
    """The reports of data ranks as the driver puts them together."""
    mesh = layout.mesh
    last = mesh.axis_size("pipeline") - 1
    heads = [
        rank
        for rank in range(mesh.size)
        if mesh.index_along(rank, ("tensor", "sequence")) == 0 and mesh.index_along(rank, ("pipeline",)) == last
    ]
    return [plain(merge(answers[rank][step] for rank in heads)) for step in range(STEPS + 1)]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_ranks_learn_what_one_device_learns(toy_dir, kind, layout):
    directory = toy_dir(num_key_value_heads=2, num_hidden_layers=4)
    expected = together([learned(0, kind, Layout(), directory)], Layout())
    found = together(run_ranks(learned, layout.ranks, kind, layout, directory), layout)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
