"""Metrics: named numbers that declare how to reduce them over microbatches, minibatches and ranks."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import SupportsFloat

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
    gathered: dict[str, list[Measure]] = {}
    for part in parts:
        for name, measure in part.items():
            gathered.setdefault(name, []).append(measure)
    return {name: _reduce(name, measures) for name, measures in gathered.items()}


def plain(metrics: Mapping[str, Measure]) -> dict[str, float]:
    """Names and values only, for trackers."""
    return {name: measure.value for name, measure in metrics.items()}


def _reduce(name: str, measures: list[Measure]) -> Measure:
    reduction = measures[0].reduction
    if any(measure.reduction is not reduction for measure in measures):
        raise ValueError(f"metric {name} is declared with more than one reduction: {measures}")
    values = [measure.value for measure in measures]
    if reduction is Reduction.mean:
        weight = math.fsum(measure.weight for measure in measures)
        if weight == 0.0:
            return Measure(0.0, 0.0, reduction)
        weighted = math.fsum(measure.value * measure.weight for measure in measures if measure.weight)
        return Measure(weighted / weight, weight, reduction)
    combine = {Reduction.sum: math.fsum, Reduction.max: max, Reduction.min: min, Reduction.last: lambda v: v[-1]}
    return Measure(combine[reduction](values), 1.0, reduction)
