"""Training the obvious way: plain transformers, the whole vocabulary, one row at a time, torch's own AdamW."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from hybridflow.batch import Batch
from hybridflow.config.training import Optimizer

Row = dict[str, Tensor]
"""One row of a batch: its token columns."""


def rows_of(batch: Batch) -> list[Row]:
    """Each row by itself."""
    columns = batch.token_columns
    return [{name: column.row(i) for name, column in columns.items()} for i in range(len(batch))]


def response_logprobs(model: nn.Module, row: Row, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [R] of one row's response, from a full forward pass without padding."""
    ids = torch.cat([row["prompt_ids"], row["response_ids"]])
    table = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / temperature, -1)
    first = len(row["prompt_ids"])
    chosen = [table[first + r - 1, token] for r, token in enumerate(row["response_ids"])]
    entropies = [-(table[first + r - 1].exp() * table[first + r - 1]).sum() for r in range(len(chosen))]
    return torch.stack(chosen), torch.stack(entropies)


def train(
    model: nn.Module, steps: Iterable[Sequence[Row]], loss_of_row: Callable[[nn.Module, Row], Tensor], config: Optimizer
) -> list[float]:
    """One optimizer step for each list of rows, whose losses are added up; the gradient norms before clipping."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
    )
    norms = []
    for rows in steps:
        optimizer.zero_grad()
        for row in rows:
            loss_of_row(model, row).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        if config.max_grad_norm and norm > config.max_grad_norm:
            for gradient in gradients:
                gradient.mul_(config.max_grad_norm / norm)
        optimizer.step()
        norms.append(float(norm))
    return norms
