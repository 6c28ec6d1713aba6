"""Metrics: named numbers that declare how to reduce them over microbatches, minibatches and ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, SupportsFloat, TypeGuard

from hybridflow.errors import ConfigError


class Reduction(StrEnum):
    """How measures of the same name are combined."""

    mean = "mean"
    sum = "sum"
    max = "max"
    min = "min"
    last = "last"


@dataclass(frozen=True)
class Measure:
    """One number, its weight in a mean (a count of tokens or sequences), and its reduction."""

    value: float
    weight: float = 1.0
    reduction: Reduction = Reduction.mean

    def __float__(self) -> float:
        return self.value


Metrics = dict[str, Measure]


class SentMetrics(NamedTuple):
    """Metrics as a rank sends them: plain columns, which the driver unpickles and merges fast for a thousand ranks."""

    names: Sequence[str]
    reductions: Sequence[str]
    values: Sequence[float]
    weights: Sequence[float]

    @staticmethod
    def of(metrics: Metrics) -> "SentMetrics":
        """The metrics as plain columns."""
        columns = zip(*((str(each.reduction), each.value, each.weight) for each in metrics.values()), strict=True)
        return SentMetrics(tuple(metrics), *columns) if metrics else SentMetrics((), (), (), ())

    def received(self) -> Metrics:
        """Restores the metrics."""
        measures = map(Measure, self.values, self.weights, map(Reduction, self.reductions))
        return dict(zip(self.names, measures, strict=True))


def mean(value: float, weight: float = 1.0) -> Measure:
    """A measure reduced to its weighted mean."""
    return Measure(float(value), float(weight), Reduction.mean)


def total(value: float) -> Measure:
    """A measure reduced to its sum."""
    return Measure(float(value), 1.0, Reduction.sum)


def maximum(value: float) -> Measure:
    """A measure reduced to its maximum."""
    return Measure(float(value), 1.0, Reduction.max)


def minimum(value: float) -> Measure:
    """A measure reduced to its minimum."""
    return Measure(float(value), 1.0, Reduction.min)


def last(value: float) -> Measure:
    """A measure reduced to its latest value, such as a learning rate."""
    return Measure(float(value), 1.0, Reduction.last)


def measured(metrics: Mapping[str, Measure | float], *, owner: str) -> Metrics:
    """The metrics that user code returned; numbers are averaged. Raises `ConfigError` for anything else."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"{owner} returned {type(metrics).__name__} instead of metrics.",
            remedy="Return a dictionary of numbers, for example wait(self.actor.update(batch)).",
        )
    found: Metrics = {}
    for name, value in metrics.items():
        if name == "step":
            raise ConfigError(
                f"{owner} returned a metric with the name 'step', which is the number of the step in each row.",
                remedy="Give it another name, such as 'own/step'.",
            )
        try:
            found[name] = value if isinstance(value, Measure) else mean(_number(value))
        except (TypeError, ValueError, RuntimeError) as error:  # of an array or a tensor with several elements
            raise ConfigError(
                f"{owner} returned the metric '{name}' as {type(value).__name__}, which is not a number.",
                remedy=f"Return a number, for example {{'{name}': float(...)}}.",
            ) from error
    return found


def _number(value: SupportsFloat) -> float:
    """A number, or a tensor or array with one element, as a number; text is none."""
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"a {type(value).__name__} is not a number")
    return float(value)


def summary(name: str, values: Iterable[float]) -> Metrics:
    """`name/mean`, `name/max` and `name/min` of the values; empty if there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        return {}
    return {
        f"{name}/mean": mean(math.fsum(numbers) / len(numbers), len(numbers)),
        f"{name}/max": maximum(max(numbers)),
        f"{name}/min": minimum(min(numbers)),
    }


def merge(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of several parts combined, each by its reduction, in order of first appearance."""
    return merge_sent(map(SentMetrics.of, parts))


def merge_sent(parts: Iterable[SentMetrics]) -> Metrics:
    """As `merge`, of metrics as they were sent."""
    sent = list(parts)
    if sent and all(part.names == sent[0].names and part.reductions == sent[0].reductions for part in sent):
        values = zip(*(part.values for part in sent), strict=True)
        weights = zip(*(part.weights for part in sent), strict=True)
        columns = zip(sent[0].names, values, weights, sent[0].reductions, strict=True)
        return {name: _reduced(name, own, own_weights, (reduction,)) for name, own, own_weights, reduction in columns}
    gathered: dict[str, list[tuple[float, float, str]]] = {}
    for part in sent:
        for name, reduction, value, weight in zip(*part, strict=True):
            gathered.setdefault(name, []).append((value, weight, reduction))
    return {name: _reduced(name, *zip(*measures, strict=True)) for name, measures in gathered.items()}


def is_metrics(answer: object) -> TypeGuard[Metrics]:
    """Whether an answer consists of measures."""
    return isinstance(answer, dict) and all(isinstance(measure, Measure) for measure in answer.values())


def plain(metrics: Mapping[str, Measure]) -> dict[str, float]:
    """Names and values only, for trackers."""
    return {name: measure.value for name, measure in metrics.items()}


def _reduced(name: str, values: Sequence[float], weights: Sequence[float], reductions: Sequence[str]) -> Measure:
    if len(set(reductions)) > 1:
        raise ValueError(f"metric {name} is declared with more than one reduction: {set(reductions)}")
    reduction = Reduction(reductions[0])
    if reduction is Reduction.mean:
        total_weight = math.fsum(weights)
        if total_weight == 0.0:
            return Measure(0.0, 0.0, reduction)
        weighted = math.fsum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
        return Measure(weighted / total_weight, total_weight, reduction)
    combine = {Reduction.sum: math.fsum, Reduction.max: max, Reduction.min: min, Reduction.last: lambda v: v[-1]}
    return Measure(combine[reduction](values), 1.0, reduction)
