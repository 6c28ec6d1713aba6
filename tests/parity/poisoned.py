"""What ranks say of a weight that is not finite on one of them, when they are to save."""

from pathlib import Path

import torch

from hybridflow.errors import HybridflowError
from tests.parity.divided import Case, engine_of


def save_of_a_poisoned_rank(rank: int, case: Case, number: float, directory: Path) -> str:
    """The last rank writes the number into one of its weights; what each rank then says of `save`."""
    engine = engine_of(case, rank)
    if rank == case.ranks - 1:
        *_, shard = (shard for shard in engine.weight_shards() if shard.tensor.numel())
        with torch.no_grad():
            shard.tensor.view(-1)[-1] = number
    try:
        engine.save(directory)
    except HybridflowError as error:
        return str(error)
    return "saved"
