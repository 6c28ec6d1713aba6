"""The state of AdamW over pieces of weights, in files of any layout."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.engines.training.optimizer import MasterAdamW
from hybridflow.engines.training.state_files import (
    FIRST_MOMENT,
    MASTER,
    SECOND_MOMENT,
    StateShard,
    load_state,
    save_state,
)
from hybridflow.parallel.groups import Ranks
from hybridflow.parallel.layout import WeightShard

ShardsOf = Callable[[Tensor], Iterable[WeightShard]]
"""What a tensor of a parameter's shape holds, as views of it: of the parameter itself, or of a moment of it."""

STEPS = "steps"


def save_optimizer(
    directory: Path, optimizer: MasterAdamW, trained: Iterable[tuple[Tensor, ShardsOf]], steps: int, ranks: Ranks
) -> None:
    """Writes moments and float32 copies of the trained parameters, and the optimizer steps taken, with all ranks."""
    copies = {weight: copy for copy, weight in optimizer.weight_of.items()}
    shards: list[StateShard] = []
    for parameter, shards_of in trained:
        moved = copies.get(parameter, parameter)
        state = optimizer.state.get(moved, {})
        for kind in (FIRST_MOMENT, SECOND_MOMENT):
            shards += [(kind, shard) for shard in shards_of(state[kind])] if kind in state else []
        if moved is not parameter:
            shards += [(MASTER, shard) for shard in shards_of(moved.detach())]
    save_state(directory, shards, {STEPS: steps}, ranks)


@torch.no_grad()
def load_optimizer(
    directory: Path, optimizer: MasterAdamW, trained: Iterable[tuple[Tensor, ShardsOf]], ranks: Ranks
) -> int:
    """Fills what `save_optimizer` wrote, of whatever engine and layout; returns the steps. The weights come first."""
    copies = {weight: copy for copy, weight in optimizer.weight_of.items()}
    shards: list[StateShard] = []
    own_copies: list[WeightShard] = []
    for parameter, shards_of in trained:
        moved = copies.get(parameter, parameter)
        state = optimizer.state[moved]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for kind in (FIRST_MOMENT, SECOND_MOMENT):
            state[kind] = torch.zeros_like(moved)
            shards += [(kind, shard) for shard in shards_of(state[kind])]
        if moved is parameter:
            own_copies += shards_of(parameter.detach())
        else:
            shards += [(MASTER, shard) for shard in shards_of(moved.detach())]
    steps = int(load_state(directory, shards, ranks, own_copies=own_copies)[STEPS])
    for state in optimizer.state.values():
        state["step"].fill_(steps)
    optimizer.settle()
    return steps
