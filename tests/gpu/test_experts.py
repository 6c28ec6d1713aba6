"""Megatron's experts on a device: torch's kernel for grouped products, and SwiGLU as `torch.compile` makes it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from hybridflow.config.model import Dtype
from hybridflow.engines.training.megatron.experts import _product, matrices
from tests.gpu.test_engines import TOLERANCES, before_and_after
from tests.spmd import run_ranks

ROWS, COLUMNS = 64, 96


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_expert", [(5, 0, 3, 17), (0, 0, 1, 0), (0, 0, 0, 0)], ids=str)
def test_grouped_products_are_those_of_experts_one_by_one(device, dtype, per_expert):
    """Numbers of rows that are no multiple of anything, and experts without any: their gradients must be 0."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(len(per_expert) * ROWS, COLUMNS, generator=generator) / COLUMNS**0.5
    tokens = torch.randn(sum(per_expert), COLUMNS, generator=generator)
    slope = torch.randn(sum(per_expert), ROWS, generator=generator)
    exact = tokens.clone().requires_grad_()
    exact_weights = [part.clone().requires_grad_() for part in whole.split(ROWS)]
    pairs = zip(exact.split(per_expert), exact_weights, strict=True)
    expected = torch.cat([F.linear(rows, weight) for rows, weight in pairs])
    gradients = torch.autograd.grad(expected, [exact, *exact_weights], slope)

    weights = [nn.Parameter(part) for part in whole.to(device, dtype).split(ROWS)]
    lying = matrices(weights, len(per_expert))
    assert lying is not None
    given = tokens.to(device, dtype).requires_grad_()
    ends = torch.tensor(per_expert).cumsum(0, dtype=torch.int32).to(device)
    found = _product(given, ends, lying, weights)
    slopes = torch.autograd.grad(found, [given, *weights], slope.to(device, dtype))
    limit = 0.1 if dtype is torch.bfloat16 else 1e-2 if device.type == "cuda" else 1e-4
    for ours, theirs in zip((found, *slopes), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.float().cpu(), theirs, atol=limit, rtol=limit)


@pytest.mark.megatron
def test_a_mixture_of_experts_agrees_with_the_cpu_before_and_after_a_step(toy_dir, device):
    """In float32: rounding to bfloat16 sends some tokens to other experts."""
    directory = str(toy_dir("qwen3_moe"))
    (found,) = run_ranks(before_and_after, 1, directory, "megatron", Dtype.float32, str(device))
    (expected,) = run_ranks(before_and_after, 1, directory, "single", Dtype.float32, "cpu")
    for ours, theirs in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < TOLERANCES[Dtype.float32]
