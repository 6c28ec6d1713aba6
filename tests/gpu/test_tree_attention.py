"""Attention to shared prefixes in bfloat16, gradients included, against float32 on a CPU."""

import torch

from hybridflow.models.packing import Packing
from hybridflow.models.tree_attention import tree_attention

LENGTHS, PARENTS = (40, 17, 3, 25, 1, 9), (-1, 0, 1, 1, 0, -1)


def attended(parts: list[torch.Tensor], slope: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """The attention and the gradients of queries, keys and values, on the CPU in float32."""
    placed = [part.to(device).requires_grad_() for part in parts]
    found = tree_attention(*placed, Packing(LENGTHS, device, parents=PARENTS), scaling=0.2)
    gradients = torch.autograd.grad(found, placed, slope.to(device, found.dtype))
    return [each.detach().cpu().float() for each in (found, *gradients)]


def test_attention_to_shared_prefixes_is_that_of_float32_up_to_rounding(device):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 32) for heads in (4, 2, 2, 4)]
    *parts, slope = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    expected = attended([part.float() for part in parts], slope, torch.device("cpu"))
    for found, exact in zip(attended(parts, slope, device), expected, strict=True):
        error = (found - exact).norm() / exact.norm()
        assert error < 2**-6, error  # bfloat16 rounds by up to 2**-9, here in a handful of operations
