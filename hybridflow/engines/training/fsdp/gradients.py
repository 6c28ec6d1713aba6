"""The norm of a gradient of which every rank holds pieces, and its limit."""

from collections.abc import Sequence

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hybridflow.engines.training.fsdp.mesh import ShardMesh
from hybridflow.engines.training.fsdp.sharding import HeldParameter


def clipped_norm(parameters: Sequence[HeldParameter], mesh: ShardMesh, *, limit: float) -> float:
    """The norm of the whole gradient, the same on all ranks; gradients of a larger norm are scaled down to `limit`.

    What several ranks hold counts once. A gradient that is not finite is left as it is.
    """
    own = get_total_norm([p.shard.grad for p in parameters if p.counts and p.shard.grad is not None])
    squares = own.to(mesh.device, torch.float64).square()
    norm = mesh.ranks.sum(squares, *mesh.ranks.mesh.sizes).sqrt()
    if norm.isfinite():
        clip_grads_with_norm_([p.shard for p in parameters], limit, norm.float())
    return float(norm)
