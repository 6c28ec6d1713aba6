"""Random rows of tokens with every kind of mask."""

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**31 - 1)
shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))
masks = st.sampled_from(["full", "right_padded", "holes", "empty_rows"])


def generator(seed: int = 0) -> torch.Generator:
    """The source of one example's numbers."""
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], seed: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def token_mask(shape: tuple[int, int], kind: str, seed: int) -> Tensor:
    """A 0/1 mask [B, R]: all ones, right-padded responses, tool words in between, or some rows empty."""
    rows, width = shape
    if kind == "full":
        return torch.ones(shape)
    source = generator(seed)
    lengths = torch.randint(1, width + 1, (rows,), generator=source)
    mask = (torch.arange(width) < lengths[:, None]).float()
    if kind == "holes":
        mask = mask * torch.randint(0, 2, shape, generator=source)
    if kind == "empty_rows":
        mask = mask * torch.randint(0, 2, (rows, 1), generator=source)
    return mask


def spoiled(values: Tensor, mask: Tensor) -> Tensor:
    """The values, with NaN where the mask is 0."""
    return torch.where(mask.bool(), values, torch.nan)


def itself(tensor: Tensor) -> Tensor:
    """The sum over the parts of a batch that has one."""
    return tensor
