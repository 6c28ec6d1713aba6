"""Which weights sampled each token: `version_runs`, and the same per token; the steps that sampled them."""

import torch
from torch import Tensor

from hybridflow.batch.ragged import Ragged

DECODE_STEPS = "decode_steps/"
"""Begins the name of metadata of finished rows, which ends with a replica: how many decoding steps it has taken for the
call that returned them."""


def token_versions(runs: Ragged, lengths: Tensor) -> Ragged:
    """The weight version of each response token, from the column `version_runs` and the responses' `lengths` [B]."""
    versions, firsts = runs.values.unbind(1)
    row = torch.arange(len(runs)).repeat_interleave(runs.lengths)
    ends = torch.cat([firsts[1:], firsts[:1]])
    last = runs.offsets[1:] - 1
    ends[last] = lengths[row[last]]
    return Ragged.from_lengths(versions.repeat_interleave(ends - firsts), lengths)
