"""Arithmetic of the cost models: on the numbers of one layout, or row by row on arrays with those of many layouts."""

from collections.abc import Iterable
from functools import reduce
from typing import cast

import numpy as np


def largest(numbers: Iterable[float]) -> float:
    """The largest of these and 0, row by row if they are arrays."""
    return reduce(np.maximum, numbers, 0.0)


def where(condition: bool, true: float, false: float) -> float:
    """`true if condition else false`, row by row if the condition is an array."""
    if isinstance(condition, np.ndarray):
        return cast(float, np.where(condition, true, false))
    return true if condition else false
