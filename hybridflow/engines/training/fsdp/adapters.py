"""Gathers the matrices of a LoRA adapter that merging needs whole."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.training.fsdp.mesh import SHARD, ShardMesh
from hybridflow.engines.training.fsdp.sharding import HeldParameter
from hybridflow.models.adapters.lora import DOWN
from hybridflow.models.names.huggingface import canonical_name


@torch.no_grad()
def gathered_downs(parameters: Sequence[HeldParameter], mesh: ShardMesh) -> dict[str, Tensor]:
    """Matrix A of each adapted weight, by the weight's name: all its rows, and this rank's columns.

    One all-gather over the shards of a replica, of half the adapter's bytes. B is not gathered: its rows are sharded
    like those of the weight.
    """
    downs = [parameter for parameter in parameters if f".{DOWN}." in parameter.name]
    pieces = [_padded(parameter, mesh.num_shards) for parameter in downs]
    if not pieces:
        return {}
    own = torch.cat([piece.flatten() for piece in pieces])
    everyones = own[None]
    if mesh.num_shards > 1:
        everyones = own.new_empty(mesh.num_shards, len(own))
        dist.all_gather_single(everyones.view(-1), own, group=mesh.devices[SHARD].get_group())
    parts = everyones.split([piece.numel() for piece in pieces], 1)
    return {
        canonical_name(parameter.name).replace(f".{DOWN}.", "."): part.reshape(-1, piece.shape[1])[
            : parameter.layout.shape[0]
        ]
        for parameter, piece, part in zip(downs, pieces, parts, strict=True)
    }


def _padded(parameter: HeldParameter, num_shards: int) -> Tensor:
    """A rank's rows, padded with zeros to the largest number of rows on any rank."""
    rows, columns = parameter.layout.shape[0], parameter.layout.local_shape[1]
    piece = parameter.shard.new_zeros(math.ceil(rows / num_shards), columns)
    piece[: parameter.shard.shape[0]] = parameter.shard
    return piece
