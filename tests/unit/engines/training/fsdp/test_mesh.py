"""Who holds what in a mesh of shards, against the definition: rank = tensor + t * (sequence + s * data)."""

import torch

from hybridflow.engines.training.fsdp.mesh import REPLICA, SHARD, TENSOR, ShardMesh
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import run_ranks

LAYOUTS = [
    (4, 1, 1, 1),
    (4, 1, 1, 2),
    (4, 1, 1, 4),
    (2, 1, 2, 1),
    (2, 1, 2, 2),
    (1, 2, 2, 1),
    (2, 2, 1, 2),
    (1, 4, 1, 1),
]
"""Sizes of data, sequence and tensor, and copies of the model."""


def places(rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], tuple[bool, bool]]]:
    found = []
    for data, sequence, tensor, replicas in LAYOUTS:
        ranks = Ranks(rank, ParallelMesh({"data": data, "sequence": sequence, "tensor": tensor}))
        mesh = ShardMesh(ranks, replicas, torch.device("cpu"))
        of_torch = tuple(mesh.devices.get_local_rank(axis) for axis in (REPLICA, SHARD, TENSOR))
        ours = (rank // (mesh.num_shards * mesh.tensor_size), mesh.shard_index, mesh.tensor_index)
        sizes = (mesh.data.size(), mesh.tensor.size())
        found.append((ours, of_torch, sizes, (mesh.is_first_holder(True), mesh.is_first_holder(False))))
    return found


def test_places_are_those_of_torch_and_each_piece_has_one_first_holder():
    """A divided parameter has a piece per shard and tensor rank, another one per shard."""
    found = run_ranks(places, 4)
    assert all(ours == of_torch for answers in found for ours, of_torch, _, _ in answers)
    for number, (data, sequence, tensor, replicas) in enumerate(LAYOUTS):
        shards = data * sequence // replicas
        assert all(answers[number][2] == (data * sequence, tensor) for answers in found)
        firsts = [answers[number][3] for answers in found]
        assert [sum(divided for divided, _ in firsts), sum(whole for _, whole in firsts)] == [shards * tensor, shards]
