"""Pretraining texts in the optimizer steps of the policy's update (PPO-ptx)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.algorithms.aggregate import aggregate
from hybridflow.batch import Batch
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.workers.model_worker import Reduce
from hybridflow.workers.objectives import IS_TEXT, measured

PRETRAINING_COLUMNS = ("prompt_ids", "response_ids", "response_mask")
"""Columns of the texts."""

MASK = "pretraining_mask"


def with_texts(batch: Batch, texts: Batch, rows: Sequence[int]) -> Batch:
    """The batch with a share of the texts after each of its minibatches, which have `rows` rows.

    `minibatch_rows` in the metadata counts the rows of both. `pretraining_mask` is 1 on tokens of the texts' loss,
    `response_mask` on those of the policy's; other columns are 0 for texts. `is_text` marks the texts.
    """
    given = texts.meta.get("minibatch_rows")
    parts = torch.arange(len(texts)).tensor_split(len(rows))
    share = given if isinstance(given, tuple) else [len(part) for part in parts]
    mask = batch.tokens("response_mask")
    policy = batch.with_columns(
        rows={IS_TEXT: torch.zeros(len(batch), dtype=torch.bool)},
        tokens={MASK: mask.like(torch.zeros_like(mask.values))},
    )
    filled = _filled(texts.only(PRETRAINING_COLUMNS), policy)
    parts = [part for pair in zip(policy.split(rows), filled.split(share), strict=True) for part in pair]
    sizes = tuple(own + other for own, other in zip(rows, share, strict=True))
    return Batch.concat(parts).with_columns(meta={**batch.meta, "minibatch_rows": sizes})


def with_pretraining(loss_fn: LossFn, minibatch: Batch, reduce: Reduce, *, coefficient: float) -> LossFn:
    """The policy's loss plus `coefficient` times the texts' mean cross-entropy per token, over all ranks.

    InstructGPT, eq. 2 (arXiv:2203.02155), whose gamma is the coefficient.
    """
    num_tokens = float(reduce(minibatch.tokens(MASK).values.double().sum()[None])[0])

    def combined(outputs: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Loss:
        policy = loss_fn(outputs, columns)
        mask = columns[MASK]
        loss = aggregate(-outputs["logprobs"], mask, mode="token-mean", num_tokens=num_tokens, num_sequences=0.0)
        metrics = measured({}, mask.sum(), {"actor/pretraining_loss": loss})
        return Loss(policy.value + coefficient * loss, policy.metrics | metrics)

    return LossFn(loss_fn.outputs, combined, masks=(*loss_fn.masks, MASK))


def _filled(texts: Batch, policy: Batch) -> Batch:
    """The texts with all columns of the policy's batch: 0 but for their tokens and `pretraining_mask`."""
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
