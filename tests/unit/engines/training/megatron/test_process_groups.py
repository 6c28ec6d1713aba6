"""Megatron-Core's process groups are the lines of the training mesh, and those of several layouts live side by side."""

import pytest
import torch
import torch.distributed as dist

from hybridflow.config.placement import Parallelism
from hybridflow.engines.training.megatron.cpu_adapter import gathered, reduce_scattered
from hybridflow.engines.training.megatron.process_groups import activate, parallel_state
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import preload, run_ranks

preload("hybridflow.engines.training.megatron.engine")

GETTERS = {
    "tensor": parallel_state.get_tensor_model_parallel_group,
    "pipeline": parallel_state.get_pipeline_model_parallel_group,
    "data": parallel_state.get_data_parallel_group,
    "expert": parallel_state.get_expert_model_parallel_group,
    "expert tensor": parallel_state.get_expert_tensor_parallel_group,
    "replica": parallel_state.get_expert_data_parallel_group,
    "expert and tensor": parallel_state.get_expert_tensor_and_model_parallel_group,
}


def members(layout: Parallelism) -> dict[str, list[int]]:
    activate(layout)
    return {name: dist.get_process_group_ranks(get()) for name, get in GETTERS.items()}


def groups_of_layouts(rank: int, *layouts: Parallelism) -> list[dict[str, list[int]]]:
    """The ranks in each group of this rank, in each layout: asked in turn, and then again."""
    first = [members(layout) for layout in layouts]
    assert [members(layout) for layout in reversed(layouts)] == first[::-1]
    return first


def expected(layout: Parallelism, rank: int, ranks: int) -> dict[str, list[int]]:
    data = ranks // (layout.tensor * layout.pipeline)
    sizes = {"data": data, "pipeline": layout.pipeline, "tensor": layout.tensor}
    mesh = ParallelMesh(sizes)
    nested = ParallelMesh({"replica": data // layout.expert, "expert": layout.expert, **sizes} | {"data": 1})
    return {
        "tensor": mesh.subgroup(rank, ("tensor",)),
        "pipeline": mesh.subgroup(rank, ("pipeline",)),
        "data": mesh.subgroup(rank, ("data",)),
        "expert": nested.subgroup(rank, ("expert",)),
        "expert tensor": mesh.subgroup(rank, ("tensor",)),
        "replica": nested.subgroup(rank, ("replica",)),
        "expert and tensor": nested.subgroup(rank, ("expert", "tensor")),
    }


def test_groups_are_the_lines_of_the_mesh_in_several_layouts_at_once():
    layouts = [
        Parallelism(tensor=2, pipeline=2),
        Parallelism(pipeline=2, expert=2),
        Parallelism(tensor=2, expert=2),
        Parallelism(pipeline=4, virtual_pipeline=2),
        Parallelism(expert=2),
    ]
    for rank, found in enumerate(run_ranks(groups_of_layouts, 4, *layouts)):
        assert found == [expected(layout, rank, 4) for layout in layouts]


def exchange(rank: int, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    assert group is not None
    share = torch.full((sizes[rank], 2), float(rank + 1))
    everything = torch.arange(2.0 * sum(sizes)).view(-1, 2)
    return gathered(share, group, sizes).numpy(), reduce_scattered(everything, group, sizes).numpy()


@pytest.mark.parametrize("sizes", [[3, 1], [0, 2], [2, 2]])
def test_shares_of_unequal_sizes_are_gathered_and_scattered(sizes):
    whole = torch.cat([torch.full((size, 2), float(rank + 1)) for rank, size in enumerate(sizes)])
    parts = (2 * torch.arange(2.0 * sum(sizes)).view(-1, 2)).split(sizes)
    for (everything, share), part in zip(run_ranks(exchange, 2, sizes), parts, strict=True):
        assert everything.tolist() == whole.tolist()
        assert share.tolist() == part.tolist()
