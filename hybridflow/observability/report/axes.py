"""Scales of a chart: from numbers to places on the drawing, and the ticks between."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_PLAIN_DECIMALS = 4
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from `low..high` to `start..end` in drawing units."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies on the drawing."""
        low, high, value = (math.log10(v) for v in (self.low, self.high, value)) if self.is_log else (
            self.low, self.high, value,
        )  # fmt: skip
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, wanted: int) -> list[tuple[float, str]]:
        """About `wanted` round values inside the scale, with their labels."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            stride = max(1, round(len(powers) / wanted))
            return [(10.0**power, f"1e{power}") for power in powers[::stride]]
        gap = round_gap((self.high - self.low) / wanted)
        first, last = math.ceil(self.low / gap - 1e-9), math.floor(self.high / gap + 1e-9)
        return [(place * gap, tick_label(place * gap, gap)) for place in range(first, last + 1)]


def value_axis(values: Sequence[float], start: float, end: float, *, is_log: bool = False) -> Axis:
    """An axis that holds the finite values with some air, from zero where zero is near."""
    numbers = [value for value in values if math.isfinite(value) and (value > 0.0 or not is_log)]
    if not numbers:
        return Axis(0.1 if is_log else 0.0, 1.0, start, end, is_log)
    low, high = min(numbers), max(numbers)
    if is_log:
        return Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** (math.floor(math.log10(high)) + 1), start, end, True)
    if 0.0 < low < 0.4 * high:
        low = 0.0
    air = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return Axis(low if low == 0.0 else low - air, high + air, start, end)


def step_axis(steps: Sequence[int], start: float, end: float) -> Axis:
    """An axis from the first to the last step."""
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    return Axis(low, high if high > low else low + 1, start, end)


def round_gap(gap: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least `gap`."""
    power = 10.0 ** math.floor(math.log10(gap))
    return next(size * power for size in (1.0, 2.0, 5.0, 10.0) if size * power >= gap * (1.0 - 1e-9))


def tick_label(value: float, gap: float) -> str:
    """The value with as many digits as the gap between ticks needs, so that no two ticks have the same label."""
    for size, unit in _UNITS:
        if gap >= 1000.0 and abs(value) >= size:
            return f"{value / size:.{_decimals(gap / size)}f}{unit}"
    decimals = _decimals(gap)
    if decimals <= _PLAIN_DECIMALS or abs(value) >= 1e-3:
        return f"{value:.{decimals}f}"
    digits = _decimals(gap / 10.0 ** math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}e}" if value else "0"


def _decimals(gap: float) -> int:
    """Digits after the point that tell multiples of the gap, a 1, 2 or 5 times a power of ten, apart."""
    return max(0, -math.floor(math.log10(gap) + 1e-9))
