"""What the progress line says, fitted to a width: pure functions from numbers to text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from hybridflow.observability import formatting

_BAR_CELLS = (24, 16, 10, 0)
_SPARK_CELLS = 16


@dataclass
class ProgressState:
    """The numbers behind the line; NaN where not known yet."""

    total_steps: int
    step: int = 0
    label: str = ""
    headline: list[float] = field(default_factory=list)
    accuracy: float = math.nan
    response_length: float = math.nan
    tokens_per_second: float = math.nan
    seconds_per_step: float = math.nan
    """Of training alone."""

    apart_per_step: float = 0.0
    """What evaluations and checkpoints took so far, divided by the steps."""

    stage: str | None = None

    @property
    def seconds_left(self) -> float:
        """Steps left times recent seconds per step, with evaluations and checkpoints at their average."""
        return (self.total_steps - self.step) * (self.seconds_per_step + self.apart_per_step)

    @property
    def score(self) -> float:
        """The latest headline number."""
        return self.headline[-1] if self.headline else math.nan


def live_line(state: ProgressState, width: int, *, is_ascii: bool = False) -> Text:
    """One coloured line of at most `width` cells; the least telling parts are left out first, the bar shrinks."""
    parts = _optional_parts(state, is_ascii=is_ascii)
    for kept in range(len(parts), -1, -1):
        for cells in _BAR_CELLS:
            line = _assemble(state, parts[:kept], cells, is_ascii=is_ascii)
            if line.cell_len <= width:
                return line
    line = Text(f"{state.step}/{state.total_steps}", no_wrap=True)
    line.truncate(width)
    return line


def plain_line(state: ProgressState) -> str:
    """One aligned line without colour, for files and continuous-integration logs."""
    digits = len(str(state.total_steps))
    line = f"step {state.step:>{digits}}/{state.total_steps}"
    if not math.isnan(state.score):
        line += f"  {state.label} {formatting.short(state.score):>7}"
    if not math.isnan(state.accuracy):
        line += f"  accuracy {formatting.short(state.accuracy):>5}"
    if not math.isnan(state.response_length):
        line += f"  length {formatting.short(state.response_length):>5}"
    if not math.isnan(state.tokens_per_second):
        line += f"  {formatting.count(state.tokens_per_second):>6} tok/s"
    line += f"  {_number(state.seconds_per_step):>5} s/step"
    return f"{line}  eta {formatting.duration(state.seconds_left):>5}"


def _optional_parts(state: ProgressState, *, is_ascii: bool) -> list[Text]:
    """From the most to the least telling."""
    parts = []
    if not math.isnan(state.score):
        parts.append(Text.assemble((f"{state.label} ", "dim"), (formatting.short(state.score), "bold green")))
        spark = "" if is_ascii else formatting.sparkline(state.headline, _SPARK_CELLS)
        if spark:
            parts.append(Text(spark, "green"))
    if not math.isnan(state.accuracy):
        parts.append(Text.assemble(("accuracy ", "dim"), (formatting.short(state.accuracy), "bold")))
    if not math.isnan(state.response_length):
        parts.append(Text.assemble(("length ", "dim"), formatting.short(state.response_length)))
    if not math.isnan(state.tokens_per_second):
        parts.append(Text.assemble(formatting.count(state.tokens_per_second), (" tok/s", "dim")))
    if state.stage is not None:
        parts.append(Text(state.stage, "italic dim"))
    return parts


def _assemble(state: ProgressState, parts: Sequence[Text], cells: int, *, is_ascii: bool) -> Text:
    head = Text.assemble(("step ", "dim"), (f"{state.step}/{state.total_steps}", "bold"))
    if cells:
        head.append(" ").append_text(_bar(state.step / max(1, state.total_steps), cells, is_ascii=is_ascii))
    head.append_text(Text.assemble((" eta ", "dim"), (formatting.duration(state.seconds_left), "cyan")))
    return Text("  ", no_wrap=True).join([head, *parts])


def _bar(fraction: float, cells: int, *, is_ascii: bool) -> Text:
    done = round(min(1.0, max(0.0, fraction)) * cells)
    full, empty = ("#", "-") if is_ascii else ("━", "━")
    return Text.assemble((full * done, "cyan"), (empty * (cells - done), "bright_black"))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else formatting.short(value)
