"""Weights are checked before they are saved: a checkpoint with NaN in it would be resumed from forever."""

# pyright: reportPrivateImportUsage=false

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from hybridflow.errors import EngineError
from hybridflow.parallel.collectives import Together
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard


def check_finite(shards: Iterable[WeightShard], ranks: Ranks) -> None:
    """Raises `EngineError` on all ranks where any of them holds a weight with NaN or infinity; called on all together.

    One fused reduction per number format, and one synchronization with the device.
    """
    with Together(ranks):
        bad = non_finite(shards)
        if bad:
            others = f" and {len(bad) - 1} other weights" if len(bad) > 1 else ""
            raise EngineError(
                f"The weight '{bad[0]}'{others} became NaN or infinite in training: nothing was saved at this step.",
                remedy="Lower the role's optimizer.learning_rate (or set optimizer.max_grad_norm). Earlier checkpoints"
                " are untouched: trainer.resume=auto, the default, resumes from the last one.",
            )


@torch.no_grad()
def non_finite(shards: Iterable[WeightShard]) -> list[str]:
    """The names of the weights whose pieces here hold NaN or infinity."""
    by_format: dict[torch.dtype, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    for shard in shards:
        if shard.tensor.is_floating_point() and shard.tensor.numel():
            by_format[shard.tensor.dtype][shard.name].append(shard.tensor.detach())
    names, largest = [], []
    for named in by_format.values():
        names += [name for name, pieces in named.items() for _ in pieces]
        norms = torch._foreach_norm([piece for pieces in named.values() for piece in pieces], torch.inf)
        largest += [norm.float() for norm in norms]
    if not largest:
        return []
    finite = torch.stack(largest).isfinite().tolist()
    return list(dict.fromkeys(name for name, is_finite in zip(names, finite, strict=True) if not is_finite))
