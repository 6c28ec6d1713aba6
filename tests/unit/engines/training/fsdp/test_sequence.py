"""Attention by exchange of heads against attention on one rank: outputs and gradients, for any numbers of heads."""

import pytest
import torch
from torch import Tensor, nn

from hybridflow.engines.training.fsdp.sequence import PackingShare, _attend_together
from hybridflow.models.packed_attention import attend
from hybridflow.models.packing import Packing
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.mesh import ParallelMesh
from tests.spmd import run_ranks

PACKING = Packing((5, 1, 7, 3), torch.device("cpu"))


def heads_of_all(heads: int, kv_heads: int) -> list[Tensor]:
    """Queries, keys, values [1, heads, N, size], and the gradient of the output [1, N, heads, size]."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    shapes = [(1, heads, 16, 8), (1, kv_heads, 16, 8), (1, kv_heads, 16, 8), (1, 16, heads, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def largest_error(rank: int, heads: int, kv_heads: int) -> float:
    """How far a rank's share of the output and of the gradients is from that of attention on one rank."""
    group = Ranks(rank, ParallelMesh({"sequence": torch.distributed.get_world_size()})).group("sequence")
    assert group is not None
    packing = PackingShare(PACKING.lengths, PACKING.device, PACKING, group)
    *inputs, slope = heads_of_all(heads, kv_heads)
    whole = [part.clone().requires_grad_() for part in inputs]
    expected, _ = attend(nn.Identity(), *whole, None, packing=PACKING, scaling=0.3)
    expected.backward(slope)
    share = [part[:, :, packing.span].clone().requires_grad_() for part in inputs]
    found, _ = _attend_together(nn.Identity(), *share, None, packing=packing, scaling=0.3)
    found.backward(slope[:, packing.span])
    pairs = [(found, expected[:, packing.span])]
    pairs += [(part.grad, all_of.grad[:, :, packing.span]) for part, all_of in zip(share, whole, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("ranks", "heads", "kv_heads"), [(2, 4, 4), (2, 4, 2), (2, 4, 1), (4, 4, 2), (4, 8, 1)])
def test_attention_together_is_attention_alone(ranks, heads, kv_heads):
    assert max(run_ranks(largest_error, ranks, heads, kv_heads)) < 1e-12
