"""Forward and backward passes over microbatches, shared by all engines that run Hugging Face models."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.engines.training.microbatch import MicroBatch, columns_of
from hybridflow.engines.training.outputs import TokenModel
from hybridflow.observability.activity import ACTIVITY
from hybridflow.observability.metrics import Metrics, merge


def forward_pass(
    model: TokenModel, micros: Sequence[MicroBatch], outputs: tuple[str, ...], *, temperature: float
) -> Batch:
    """The named outputs as token columns of a batch's responses, in the order of its rows; no gradient."""
    with torch.no_grad():
        return joined_outputs([(micro, _advanced(model(micro, outputs, temperature))) for micro in micros])


def joined_outputs(parts: Iterable[tuple[MicroBatch, dict[str, Tensor]]]) -> Batch:
    """The outputs of microbatches as token columns, in the order of the batch's rows."""
    micros = list(parts)
    counted = [(micro, outputs) for micro, outputs in micros if micro.counts]
    order = torch.cat([torch.empty(0, dtype=torch.int64), *(micro.rows for micro, _ in counted)]).argsort()
    tokens = {}
    for name in micros[0][1]:
        flat = torch.cat([torch.empty(0), *(outputs[name].float().cpu() for _, outputs in counted)])
        lengths = torch.cat([torch.empty(0, dtype=torch.int64), *(micro.lengths for micro, _ in counted)])
        tokens[name] = Ragged.from_lengths(flat, lengths).select(order)
    return Batch.of(tokens=tokens)


def accumulate_gradients(
    model: TokenModel,
    batch: Batch,
    micros: Sequence[MicroBatch],
    loss_fn: LossFn,
    *,
    temperature: float,
    before_backward: Callable[[bool], None] = lambda is_last: None,
) -> Metrics:
    """Accumulates the gradients of all microbatches' losses, and returns the metrics of the losses.

    `before_backward(is_last)` is called before each backward pass, for engines that reduce gradients after the last.
    """
    reports = []
    for number, micro in enumerate(micros, 1):
        loss = loss_of(loss_fn, batch, micro, model(micro, loss_fn.outputs, temperature))
        reports.append(loss.metrics)
        before_backward(number == len(micros))
        loss.value.backward()
    return merge(reports)


def loss_of(loss_fn: LossFn, batch: Batch, micro: MicroBatch, outputs: Mapping[str, Tensor]) -> Loss:
    """The loss of one microbatch of the batch; 0, with a gradient of 0, for one that does not count."""
    ACTIVITY.advance()
    if not micro.counts:
        return Loss(torch.stack([flat.sum() for flat in outputs.values()]).sum() * 0.0, {})
    padded = {name: micro.spread(flat) for name, flat in outputs.items()}
    return loss_fn(padded, columns_of(batch, micro, micro.input_ids.device))


def _advanced(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    ACTIVITY.advance()
    return outputs
