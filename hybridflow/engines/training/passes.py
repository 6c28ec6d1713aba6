"""Passes over micro-batches, the same for every engine that runs Hugging Face models."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.batch import Batch, Ragged
from hybridflow.engines.training.interface import Loss, LossFn
from hybridflow.engines.training.microbatch import MicroBatch, columns_of
from hybridflow.engines.training.outputs import TokenModel
from hybridflow.errors import EngineError
from hybridflow.observability.metrics import Metrics, merge


def finite_norm(norm: float, *, step: int) -> float:
    """The gradient's norm at an optimizer step, counted from 1; raises `EngineError` where it is not finite."""
    if not math.isfinite(norm):
        raise EngineError(
            f"The gradient's norm is {norm} at optimizer step {step}.",
            remedy="Lower the learning rate, or look at the last samples and rewards for values out of range.",
        )
    return norm


def forward_pass(
    model: TokenModel, micros: Sequence[MicroBatch], outputs: tuple[str, ...], *, temperature: float
) -> Batch:
    """The named outputs as token columns of a batch's responses, in the order of its rows; no gradient."""
    with torch.no_grad():
        return joined_outputs([(micro, model(micro, outputs, temperature)) for micro in micros])


def joined_outputs(parts: Iterable[tuple[MicroBatch, dict[str, Tensor]]]) -> Batch:
    """A model's outputs for all micro-batches as token columns, in the order of the batch's rows."""
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
    """Adds the gradients of all micro-batches' losses to the parameters', and returns what the losses report.

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
    """The loss of one of the batch's micro-batches; 0, with a gradient of 0, for one that does not count."""
    if not micro.counts:
        return Loss(torch.stack([flat.sum() for flat in outputs.values()]).sum() * 0.0, {})
    padded = {name: micro.spread(flat) for name, flat in outputs.items()}
    return loss_fn(padded, columns_of(batch, micro, micro.input_ids.device))
