"""Generation divided into pipeline stages: planned and carried out between real ranks, and put together from the slots.

vLLM runs pipelines on GPUs alone; what each of its ranks would hold is known without it.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.planning import lower_bound
from hybridflow.config.derived import training_mesh
from hybridflow.config.model import Model
from hybridflow.config.placement import Parallelism
from hybridflow.config.rollout import Transfer
from hybridflow.config.training import Training, TrainingEngine
from hybridflow.engines.rollout.vllm.weights import rank_layouts
from hybridflow.engines.training.factory import make_language_engine
from hybridflow.models.geometry import read_geometry
from hybridflow.parallel import ParallelMesh
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard
from hybridflow.resharding.grouping import generation_mesh, micro_data_groups
from hybridflow.resharding.resharder import Resharder
from tests.distributed.hybrid import assembled
from tests.spmd import preload, run_ranks

preload("hybridflow.engines.training.megatron.engine")
pytestmark = pytest.mark.megatron

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 4}
LAYOUTS = {
    "megatron p2 t2 -> p2 t2": (Parallelism(pipeline=2, tensor=2), 2, 2),
    "megatron p2 t2 -> p2 t1": (Parallelism(pipeline=2, tensor=2), 2, 1),
    "megatron p4 -> p2 t1": (Parallelism(pipeline=4), 2, 1),
    "megatron t4 over p1 -> p2 t2": (Parallelism(tensor=2), 2, 2),
}
FAST = "megatron p2 t2 -> p2 t1"


def fill_slots(rank: int, directory: Path, parallelism: Parallelism, pipeline: int, tensor: int, num_ranks: int):
    """A rank program: the pieces that this rank trains and those that it would generate with, and bytes received."""
    mesh = ParallelMesh(training_mesh(parallelism, num_ranks))
    training = Training(engine=TrainingEngine.megatron, parallelism=parallelism)
    engine = make_language_engine(
        Model(path=str(directory)),
        training,
        total_optimizer_steps=1,
        device=torch.device("cpu"),
        ranks=Ranks(rank, mesh),
    )
    generation = generation_mesh(mesh, copies=mesh.axis_size("data"), tensor=tensor, pipeline=pipeline)
    layouts = rank_layouts(read_geometry(directory), generation, rank)
    slots = {n: WeightShard(n, torch.full(place.local_shape, torch.nan), place) for n, place in layouts.items()}
    bound = engine.bind(slots)
    neighbor = next(i for i, group in enumerate(micro_data_groups(generation)) if rank in group)
    world = torch.distributed.group.WORLD
    resharder = Resharder(engine.weight_shards, slots, group=world, transfer=Transfer(), neighbor=neighbor)
    report = resharder.transfer(1)
    shards = {"trained": engine.weight_shards(), "generating": slots.values()}
    held = {which: _held(pieces) for which, pieces in shards.items()}
    return held, report.bytes_moved, lower_bound(resharder.plan, rank), len(bound)


def _held(shards) -> dict[str, list]:
    held: dict[str, list] = {}
    for shard in shards:
        values: np.ndarray = shard.tensor.detach().numpy().copy()
        held.setdefault(shard.name, []).append((shard.layout.box, shard.layout.shape, values))
    return held


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in LAYOUTS])
def test_stages_of_generation_hold_the_model_that_is_trained(toy_dir, layout):
    parallelism, pipeline, tensor = LAYOUTS[layout]
    directory = toy_dir("qwen3", tie_word_embeddings=True, **SIZES)
    answers = run_ranks(fill_slots, 4, directory, parallelism, pipeline, tensor, 4)
    trained = assembled([held["trained"] for held, *_ in answers])
    generating = assembled([held["generating"] for held, *_ in answers])
    assert set(trained) == set(generating)
    for name, weight in trained.items():
        assert torch.equal(weight, generating[name]), name
    for _, moved, least, _ in answers:
        assert moved == least
    assert sum(num_bound for *_, num_bound in answers) > 0
