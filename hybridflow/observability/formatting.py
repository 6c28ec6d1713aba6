"""Numbers for people to read: durations, counts, three significant digits, sparklines."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

_BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`; `-:--` when unknown."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def spoken_duration(seconds: float) -> str:
    """`3.4 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"


def count(number: float) -> str:
    """`950`, `12.3k`, `4.5M`, `7.8B`."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size * 0.9995:
            scaled = number / size
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def counted(number: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {what}{'s' * (number != 1)}"


_ROUNDING = 1e-12
"""Sums of floats that would be 0 without rounding are smaller."""


def short(number: float) -> str:
    """About three significant digits: `0`, `0.621`, `0.0165`, `12.3`, `54.5k`, `1.2e-05`; `-` for NaN.

    Used by the console and the report, so that a number looks the same everywhere.
    """
    if not math.isfinite(number):
        return "-" if math.isnan(number) else str(number)
    size = abs(number)
    if size >= 1e4:
        return count(number)
    if number == round(number):
        return f"{number:.0f}"
    if size < 1e-3:
        return f"{number:.1e}" if size > _ROUNDING else "0"
    decimals = max(0, 2 - math.floor(math.log10(float(f"{size:.3g}"))))
    return f"{number:.{decimals}f}"


def percent(part: float, whole: float) -> str:
    """`0.22%`, `36%` or `117%`: two significant digits, or whole; `100%` is all, nearly all `99.5%` to `99.9%`."""
    share = 100 * part / whole
    if part >= whole:
        return f"{share:,.0f}%"
    return f"{share:.2g}%" if share < 99.5 else f"{min(share, 99.9):.3g}%"


def columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Rows of cells as lines with aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(justify, row, widths)).rstrip() for row in rows]


def table(rows: Sequence[Sequence[str]], *, numbers: Sequence[int]) -> list[str]:
    """Aligned columns; those of numbers to the right."""
    widths = {column: max(len(row[column]) for row in rows) for column in numbers}
    return columns([[cell.rjust(widths.get(at, 0)) for at, cell in enumerate(row)] for row in rows])


def cell(value: object) -> str:
    """A value in a table; empty for None."""
    return short(value) if isinstance(value, float) else "" if value is None else str(value)


def sparkline(values: Sequence[float], cells: int) -> str:
    """The values as at most `cells` block characters, scaled to their range; each cell averages a part of them."""
    numbers = [value for value in values if math.isfinite(value)]
    cells = min(cells, len(numbers))
    if cells < 2:
        return ""
    edges = [round(cell * len(numbers) / cells) for cell in range(cells + 1)]
    means = [math.fsum(numbers[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in means)
