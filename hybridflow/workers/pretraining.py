"""Texts of the policy's pretraining in the optimizer steps of its update (PPO-ptx): two losses of one batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.algorithms.losses.supervised import negative_log_likelihood
from hybridflow.batch import Batch, Ragged
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.workers.objectives import IS_TEXT, measured
from hybridflow.workers.reduction import Reduce

PRETRAINING_COLUMNS = ("prompt_ids", "response_ids", "response_mask")
"""What the texts must have."""

MASK = "pretraining_mask"


def with_texts(batch: Batch, texts: Batch, rows: Sequence[int]) -> Batch:
    """Each minibatch of the batch (minibatch i has `rows[i]` rows) followed by its share of the texts.

    The metadata then says how many rows each has. `pretraining_mask` is 1 where the texts' loss counts,
    `response_mask` where the policy's does; columns that texts lack are 0 there. `is_text` says which rows are texts.
    """
    given = texts.meta.get("minibatch_rows")
    share = given if isinstance(given, tuple) else _equal_sizes(len(texts), len(rows))
    policy = batch.with_columns(
        rows={IS_TEXT: torch.zeros(len(batch), dtype=torch.bool)},
        tokens={MASK: _zeros(batch.tokens("response_mask"))},
    )
    beside = _filled(texts.only(PRETRAINING_COLUMNS), policy)
    parts = [part for pair in zip(policy.split(rows), beside.split(share), strict=True) for part in pair]
    sizes = tuple(own + other for own, other in zip(rows, share, strict=True))
    return Batch.concat(parts).with_columns(meta={**batch.meta, "minibatch_rows": sizes})


def with_pretraining(loss_fn: LossFn, minibatch: Batch, reduce: Reduce, *, coefficient: float) -> LossFn:
    """The policy's loss plus `coefficient` times the texts' cross-entropy, averaged over their tokens on all ranks.

    InstructGPT, eq. 2 (arXiv:2203.02155), whose gamma is the coefficient.
    """
    num_tokens = float(reduce(minibatch.tokens(MASK).values.double().sum()[None])[0])

    def both(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        policy = loss_fn(outputs, columns)
        mask = columns[MASK]
        losses = negative_log_likelihood(outputs["logprobs"])
        loss = aggregate(losses, mask, mode="token-mean", num_tokens=num_tokens, num_sequences=0.0)
        reported = measured({}, mask, {"actor/pretraining_loss": loss})
        return Loss(policy.value + coefficient * loss, policy.metrics | reported)

    return LossFn(loss_fn.outputs, both)


def _filled(texts: Batch, policy: Batch) -> Batch:
    """The texts with the policy's columns: its mask 0, the texts' own mask under its name, zeros for all others."""
    masks = texts.tokens("response_mask")
    rows = {name: column.new_zeros((len(texts), *column.shape[1:])) for name, column in policy.row_columns.items()}
    tokens = {name: texts.tokens(name) for name in ("prompt_ids", "response_ids")} | {MASK: masks}
    for name, column in policy.token_columns.items():
        if name not in tokens:
            shape = (len(masks.values), *column.values.shape[1:])
            tokens[name] = masks.like(column.values.new_zeros(shape))
    rows[IS_TEXT] = torch.ones(len(texts), dtype=torch.bool)
    objects = {name: [None] * len(texts) for name in policy.objects}
    return Batch.of(rows=rows, tokens=tokens, objects=objects)


def _zeros(column: Ragged) -> Ragged:
    return column.like(torch.zeros_like(column.values))


def _equal_sizes(count: int, parts: int) -> list[int]:
    return [len(piece) for piece in torch.arange(count).tensor_split(parts)]
