"""Weights read from a file are finite, or the model is refused before it computes anything."""

import math
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.errors import EngineError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_finite(name: str, weight: Tensor, place: Path) -> None:
    """Raises `EngineError` for a weight with NaN or infinite elements; `place` is the file or directory it is from.

    One pass over the weight, without a copy. Integers and 8-bit floats are not looked at.
    """
    if weight.numel() == 0 or weight.dtype not in _FLOATS or weight.is_meta:
        return
    low, high = weight.detach().aminmax()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise EngineError(
            f"The weight '{name}' in {place} is not finite: it has NaN or infinite elements.",
            remedy="The file is damaged, or comes from a run that diverged; use other weights.",
        )
