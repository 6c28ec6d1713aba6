"""AdamW: its parameter groups, and its state under parameter names."""

import torch
from torch import Tensor, nn

from hybridflow.config.training import Optimizer

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only, in one fused kernel."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """The moments of each parameter, in order of the groups; empty dictionaries before the first step."""
    return [
        {key: optimizer.state[p][key] for key in _MOMENTS if key in optimizer.state[p]} for p in _ordered(optimizer)
    ]


def restore_optimizer(optimizer: torch.optim.Optimizer, states: list[dict[str, Tensor]]) -> None:
    """Puts back what `optimizer_state` gave."""
    for parameter, state in zip(_ordered(optimizer), states, strict=True):
        optimizer.state[parameter] = {key: tensor.clone() for key, tensor in state.items()}


def _ordered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
