"""Metrics: named numbers that declare how to reduce them over microbatches, minibatches and ranks."""

import json
import math
from array import array
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
    """Metrics as a rank sends them: two objects, which the driver unpickles and merges fast for a thousand ranks."""

    schema: str
    """The names and the reductions, as JSON on one line."""

    numbers: bytes
    """The values and then the weights, as 64-bit floats."""

    @staticmethod
    def of(metrics: Metrics) -> "SentMetrics":
        """Packs the metrics."""
        measures = metrics.values()
        numbers = array("d", [*(each.value for each in measures), *(each.weight for each in measures)])
        return SentMetrics(json.dumps([[*metrics], [each.reduction for each in measures]]), numbers.tobytes())

    def received(self) -> Metrics:
        """Restores the metrics."""
        names, reductions = json.loads(self.schema)
        numbers = array("d", self.numbers)
        measures = map(Measure, numbers, numbers[len(names) :], map(Reduction, reductions))
        return dict(zip(names, measures, strict=True))


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
    gathered: dict[str, list[tuple[float, float, Reduction]]] = {}
    for part in parts:
        for name, measure in part.items():
            gathered.setdefault(name, []).append((measure.value, measure.weight, measure.reduction))
    return {name: _reduced(name, *zip(*measures, strict=True)) for name, measures in gathered.items()}


def merge_sent(parts: Sequence[SentMetrics]) -> Metrics:
    """As `merge`, of metrics as they were sent; at least one."""
    schema = parts[0].schema
    if any(part.schema != schema for part in parts):
        return merge(part.received() for part in parts)
    names, reductions = json.loads(schema)
    numbers, width = array("d", b"".join(part.numbers for part in parts)), 2 * len(names)
    return {
        name: _reduced(name, numbers[place::width], numbers[len(names) + place :: width], (reduction,))
        for place, (name, reduction) in enumerate(zip(names, reductions, strict=True))
    }


def is_metrics(answer: object) -> TypeGuard[Metrics]:
    """Whether an answer consists of measures."""
    return isinstance(answer, dict) and all(isinstance(measure, Measure) for measure in answer.values())


def plain(metrics: Mapping[str, Measure]) -> dict[str, float]:
    """Names and values only, for trackers."""
    return {name: measure.value for name, measure in metrics.items()}


def _reduced(name: str, values: Sequence[float], weights: Sequence[float], reductions: Sequence[str]) -> Measure:
    if len(set(reductions)) > 1:
        raise ValueError(
            f"metric {name} is declared with more than one reduction: {', '.join(sorted(set(reductions)))}"
        )
    reduction = Reduction(reductions[0])
    if reduction is Reduction.mean:
        total_weight = math.fsum(weights)
        if total_weight == 0.0:
            return Measure(0.0, 0.0, reduction)
        weighted = math.fsum(value * weight for value, weight in zip(values, weights, strict=True) if weight)
        return Measure(weighted / total_weight, total_weight, reduction)
    combine = {Reduction.sum: math.fsum, Reduction.max: max, Reduction.min: min, Reduction.last: lambda v: v[-1]}
    return Measure(combine[reduction](values), 1.0, reduction)
