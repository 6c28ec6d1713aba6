"""The progress line: redrawn on a terminal; elsewhere, occasional plain lines."""

import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from hybridflow.observability import formatting
from hybridflow.observability.printable import error_console

EVALUATING = "evaluating {} held-out rows"
_PLAIN_FIRST_STEPS = 3
_PLAIN_EVERY_SECONDS = 5.0
_RECENT_STEPS = 20
_TESTING = "testing"
_APART = (_TESTING, "save_checkpoint")
"""Stages outside steps: seconds per step and the time left exclude them; their own time left is shown next to it."""

_SLOW_SECONDS = 1.0
"""Evaluations that take at least this long show how long they took."""

_HEADLINES = {"critic/score/mean": "score", "train/loss": "loss"}
"""Metric -> label; the first one that a step has is the headline."""

_ACCURACY = "rewards/accuracies"
"""How often the chosen response has the higher reward; shown after the headline."""

_STALENESS = "async/staleness/mean"
"""Only asynchronous runs have it."""

_EVAL_NAME = re.compile(r"val-core/(?P<source>.+)/(?P<what>[^/]+)/(?P<of>mean|pass)@(?P<samples>\d+)")
_HELD_OUT_NAME = re.compile(r"val-core/(?P<source>.+)/(?P<what>acc|loss|margin|perplexity)")
_FAILED_NAME = re.compile(r"val-aux/(?P<source>.+)/failed_fraction")
_PART_NAME = re.compile(r"val-aux/(?P<source>.+)/(?P<what>[^/]+)/mean")


class Progress:
    """Shows step k of N, time left, the headline metric with its history, response length and tokens per second.

    States: hidden -> `start` -> shown -> `close`. `update` and `evaluation` print nothing while hidden.

        progress = Progress(total_steps=200)
        progress.start()
        progress.update(1, {"critic/score/mean": 0.4, "response_length/mean": 5.2, "perf/throughput": 9000.0})
        progress.evaluation(1, {"val-core/arithmetic/acc/mean@1": 0.41})
        progress.close()
    """

    def __init__(
        self,
        total_steps: int,
        *,
        start_step: int = 0,
        evaluating: str = EVALUATING,
        console: Console | None = None,
        is_live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_step`: steps done before this process started (a resumed run); `evaluating`: words for `{}` rows."""
        self.console = console or error_console()
        self._state = ProgressState(total_steps=total_steps, step=start_step)
        self._evaluating = evaluating
        self._is_live = is_live_terminal(self.console) if is_live is None else is_live
        self._clock = clock
        self._live: Live | None = None
        self._is_shown = False
        self._first_step = start_step + 1
        self._apart_since: float | None = None
        self._apart_seconds = 0.0
        self._evaluation_seconds: float | None = None
        self._ends: deque[float] = deque([clock()], maxlen=_RECENT_STEPS + 1)
        self._printed_at = self._part_printed_at = -math.inf
        self._is_testing = self._is_announced = self._is_stepping = False
        self._says_all_steps = True
        self._first_eval: dict[str, float] = {}

    def recall(self, history: Iterable[Mapping[str, object]]) -> None:
        """Restores the headline's history and the first evaluation from the metrics of earlier steps."""
        for row in history:
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, (int, float))}
            self._follow(numbers)
            self._first_eval = _evaluations(numbers) | self._first_eval

    def start(self) -> None:
        """Starts to show, and starts the clock of the first step."""
        self._is_shown = True
        self._restart_clock()
        if self._is_live:
            self._live = Live(self, console=self.console, refresh_per_second=2.0, redirect_stdout=sys.stdout.isatty())
            self._live.start()

    def stage(self, name: str | None) -> None:
        """Shows the current stage; see `StageTimers(on_stage=...)`."""
        self._state.stage = None if name == "step" else name
        if self._apart_since is not None:
            seconds = self._clock() - self._apart_since
            self._apart_seconds += seconds
            if self._is_testing:
                self._evaluation_seconds = seconds
        self._is_testing, self._is_announced = name == _TESTING, False
        self._apart_since = self._clock() if name in _APART else None
        if name == "step" and self._state.step < self._first_step:
            self._apart_seconds = 0.0
            self._restart_clock()
        elif name == "step" and self._is_stepping:  # a fault interrupted the step: its time is not that of steps
            lost = self._trained_seconds() - self._ends[-1]
            self._ends = deque((end + lost for end in self._ends), maxlen=self._ends.maxlen)
        self._is_stepping = self._is_stepping or name == "step"

    def part(self, stage: str, done: int, total: int) -> None:
        """Shows how much of a stage is done: on the line, or as plain lines if an evaluation takes long."""
        words = self._evaluating.format(total) if stage == _TESTING else stage
        self._state.stage = f"{words} {_percent(done, total)}" if done else words
        if self._live is not None or not self._is_shown or stage != _TESTING:
            return
        last, now = self._evaluation_seconds, self._clock()
        if not self._is_announced:
            self._is_announced, self._part_printed_at = True, now
            if last is None or last >= _PLAIN_EVERY_SECONDS:
                self.console.print(Text(f"{words} ..."))
        elif done and now - self._part_printed_at >= _PLAIN_EVERY_SECONDS:
            self._part_printed_at = now
            self.console.print(Text(f"{words} ... {_percent(done, total)}"))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics of a step that has ended."""
        state, self._is_stepping = self._state, False
        elapsed = self._trained_seconds() - self._ends[-1]
        self._ends.append(self._trained_seconds())
        state.step = step
        state.apart_per_step = self._apart_seconds / max(1, step - self._first_step + 1)
        state.seconds_per_step = (self._ends[-1] - self._ends[0]) / max(1, len(self._ends) - 1)
        state.accuracy = metrics.get(_ACCURACY, math.nan)
        state.response_length = metrics.get("response_length/mean", math.nan)
        tokens = metrics.get("perf/total_num_tokens", math.nan)
        state.tokens_per_second = metrics.get("perf/throughput", tokens / elapsed if elapsed > 0 else math.nan)
        state.staleness = metrics.get(_STALENESS, math.nan)
        self._follow(metrics)
        if self._live is not None:
            self._live.refresh()
        elif self._is_shown:
            self._print_now_and_then()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a line with the `val-core/*` metrics, each followed by its first value."""
        current = _evaluations(metrics)
        if current and self._is_shown:
            self.console.print(self._evaluation_line(step, current))
        self._first_eval = current | self._first_eval

    def close(self) -> None:
        """Stops showing; the last line stays."""
        if self._live is not None:
            self._state.stage = None
            self._live.stop()
            self._live = None
        self._is_shown = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live line at the current width of the terminal."""
        yield live_line(self._state, options.max_width, is_ascii=options.ascii_only)

    def _print_now_and_then(self) -> None:
        now = self._clock()
        state = self._state
        is_early = state.step - self._first_step < _PLAIN_FIRST_STEPS
        is_due = now - self._printed_at >= _PLAIN_EVERY_SECONDS
        if is_early or is_due or state.step >= state.total_steps:
            self._printed_at = now
            self.console.print(Text(plain_line(state)))
        elif self._says_all_steps:
            self._says_all_steps = False
            self.console.print(
                Text(f"(from here, at most one line every {_PLAIN_EVERY_SECONDS:g} s; metrics.jsonl has every step)")
            )

    def _restart_clock(self) -> None:
        self._ends.clear()
        self._ends.append(self._trained_seconds())

    def _trained_seconds(self) -> float:
        """The clock without the time of evaluations and checkpoints."""
        apart = 0.0 if self._apart_since is None else self._clock() - self._apart_since
        return self._clock() - self._apart_seconds - apart

    def _evaluation_line(self, step: int, current: Mapping[str, float]) -> Text:
        line = Text.assemble(("eval", "bold magenta"), f"  step {step:>{len(str(self._state.total_steps))}}")
        for name, value in current.items():
            line.append(f"  {eval_label(name)} ").append(formatting.short(value), "bold")
            if name in self._first_eval:
                line.append(f" (was {formatting.short(self._first_eval[name])})", "dim")
        if (seconds := self._evaluation_seconds) is not None and seconds >= _SLOW_SECONDS:
            line.append(f"  in {formatting.spoken_duration(seconds)}", "dim")
        return line

    def _follow(self, metrics: Mapping[str, float]) -> None:
        name = next((name for name in _HEADLINES if math.isfinite(metrics.get(name, math.nan))), None)
        if name is not None:
            self._state.label = _HEADLINES[name]
            self._state.headline.append(metrics[name])


def eval_label(name: str) -> str:
    """`val-core/calculator/acc/mean@1` -> `calculator exact match`; unknown names are unchanged.

    `val-core/pairs/acc`, a metric of held-out rows -> `pairs held-out accuracy`; `val-aux/calculator/format/mean`, one
    of several rewards -> `calculator reward format`; `val-aux/games/failed_fraction` -> `games failed fraction`.
    """
    if failed := _FAILED_NAME.fullmatch(name):
        return f"{failed['source']} failed fraction"
    if part := _PART_NAME.fullmatch(name):
        return f"{part['source']} reward {part['what']}"
    if held_out := _HELD_OUT_NAME.fullmatch(name):
        return f"{held_out['source']} held-out {held_out['what'].replace('acc', 'accuracy')}"
    match = _EVAL_NAME.fullmatch(name)
    if match is None:
        return name
    what = "exact match" if match["what"] == "acc" else match["what"].replace("_", " ")
    of = "mean" if match["of"] == "mean" else "best"
    return f"{match['source']} {what}" + (f" ({of} of {match['samples']})" if match["samples"] != "1" else "")


def _evaluations(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("val-core/")}


def is_live_terminal(console: Console) -> bool:
    """Whether the line can be redrawn: not in a file, a notebook, a dumb terminal or a CI that forces color."""
    return console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter and console.file.isatty()


def _percent(done: int, total: int) -> str:
    return f"{100 * done // max(1, total)}%"


_LITTLE = 0.05
"""Share of the time left that evaluations and checkpoints must exceed to be shown."""

_APART_WORDS = "evaluating and saving"

_BAR_CELLS = (24, 16, 10, 0)
_SPARK_CELLS = 16


@dataclass
class ProgressState:
    """The numbers of the progress line; NaN if not known yet."""

    total_steps: int
    step: int = 0
    label: str = ""
    headline: list[float] = field(default_factory=list)
    accuracy: float = math.nan
    response_length: float = math.nan
    tokens_per_second: float = math.nan
    staleness: float = math.nan
    seconds_per_step: float = math.nan
    """Without evaluations and checkpoints."""

    apart_per_step: float = 0.0
    """Seconds of evaluations and checkpoints so far, divided by the number of steps."""

    stage: str | None = None

    @property
    def seconds_left(self) -> float:
        """Steps left times recent seconds per step: the time left of training alone."""
        return (self.total_steps - self.step) * self.seconds_per_step

    @property
    def apart_left(self) -> str:
        """The time that evaluations and checkpoints will add, at their average so far; empty if it is little."""
        seconds = (self.total_steps - self.step) * self.apart_per_step
        return f"+{formatting.duration(seconds)}" if seconds > max(1.0, _LITTLE * self.seconds_left) else ""


def live_line(state: ProgressState, width: int, *, is_ascii: bool = False) -> Text:
    """One colored line of at most `width` cells; the bar shrinks, and the least important parts are left out first."""
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
    """One aligned line without color, for files and logs of continuous integration."""
    digits = len(str(state.total_steps))
    line = f"step {state.step:>{digits}}/{state.total_steps}"
    for before, number, after, width in _facts(state):
        line += f"  {before}{number:>{width}}{after}"
    seconds, left = formatting.short(state.seconds_per_step), formatting.duration(state.seconds_left)
    apart = f" {state.apart_left} {_APART_WORDS}" if state.apart_left else ""
    return f"{line}  {seconds:>5} s/step  eta {left:>5}{apart}"


def _facts(state: ProgressState) -> list[tuple[str, str, str, int]]:
    """The text before each known number, the number, the text after it, and its width in aligned lines."""
    facts = (
        (f"{state.label} ", state.headline[-1] if state.headline else math.nan, formatting.short, "", 7),
        ("accuracy ", state.accuracy, formatting.short, "", 5),
        ("length ", state.response_length, formatting.short, "", 5),
        ("", state.tokens_per_second, formatting.count, " tok/s", 6),
        ("staleness ", state.staleness, formatting.short, "", 5),
    )
    return [(before, form(value), after, width) for before, value, form, after, width in facts if not math.isnan(value)]


def _optional_parts(state: ProgressState, *, is_ascii: bool) -> list[Text]:
    """From the most to the least important."""
    parts = []
    for before, number, after, _ in _facts(state):
        is_headline = before == f"{state.label} "
        parts.append(Text.assemble((before, "dim"), (number, "bold green" if is_headline else "bold"), (after, "dim")))
        spark = "" if is_ascii else formatting.sparkline(state.headline, _SPARK_CELLS)
        if is_headline and spark:
            parts.append(Text(spark, "green"))
    if state.stage is not None:
        parts.append(Text(state.stage, "italic dim"))
    if state.apart_left:
        parts.append(Text(f"({state.apart_left} {_APART_WORDS})", "dim"))
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
