"""Each case runs on a CPU, as a test of itself, and on a GPU where there is one: `pytest tests/gpu -m gpu`."""

import pytest
import torch

from tests.toys import toy_dir

__all__ = ["toy_dir"]

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a case runs."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device(request.param)
