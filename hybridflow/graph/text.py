"""A traced step for a terminal: a table by time, and the roles below it."""

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hybridflow.graph.trace import DRIVER, Trace, TracedCall

_COLORS = ("cyan", "yellow", "magenta", "blue", "green", "red")


def text_drawing(trace: Trace) -> RenderableType:
    """The whole drawing, as wide as the terminal."""
    colors = {name: _COLORS[number] for name, number in trace.colors.items()}
    title = Text.assemble((trace.title, "bold"), "  ", (trace.purpose, "dim"))
    ahead = [*_ahead(trace, colors), ""] if trace.lag else []
    return Group(title, "", _step(trace, colors), "", *ahead, *_notes(trace), "", _roles(trace, colors))


def _step(trace: Trace, colors: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("time", no_wrap=True)
    table.add_column("call", no_wrap=True)
    if len(trace.pools) > 1:
        table.add_column("pool", no_wrap=True)
    table.add_column("columns", ratio=1)
    for call in sorted(trace.calls, key=lambda call: (call.time, call.number)):
        name = Text.assemble((f"{call.number:>2} ", "dim"), (call.role, f"bold {colors[call.role]}"), f".{call.method}")
        place = [Text(call.pool)] if len(trace.pools) > 1 else []
        table.add_row(_mark(call, trace), name, *place, _columns(call, trace, colors))
    return table


def _mark(call: TracedCall, trace: Trace) -> Text:
    """The time, once; a bracket around calls that run concurrently."""
    together = [other.number for other in trace.calls if other.time == call.time]
    if len(together) == 1:
        return Text(f"{call.time:>3}", "bold")
    is_first, is_last = call.number == together[0], call.number == together[-1]
    bracket = "\N{BOX DRAWINGS LIGHT DOWN AND HORIZONTAL}" if is_first else "\N{BOX DRAWINGS LIGHT VERTICAL}"
    bracket = "\N{BOX DRAWINGS LIGHT UP AND HORIZONTAL}" if is_last else bracket
    return Text(f"{call.time if is_first else '':>3} {bracket}", "bold")


def _columns(call: TracedCall, trace: Trace, colors: Mapping[str, str]) -> Table:
    """The columns that a call takes and adds."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    if call.takes:
        table.add_row("takes", Text(" \N{MIDDLE DOT} ", "dim").join(_taken(call, trace, colors)))
    if call.adds:
        table.add_row("adds", Text(" ".join(call.adds), colors[call.role]))
    if call.after:
        table.add_row("after", Text(", ".join(map(str, call.after))))
    return table


def _taken(call: TracedCall, trace: Trace, colors: Mapping[str, str]) -> Iterator[Text]:
    """The columns of each maker, and the number of the call that made them."""
    for maker, names in call.takes.items():
        own = [name for name in names if maker != DRIVER or name not in trace.data]
        given = [name for name in names if name not in own]
        style = "" if maker == DRIVER else colors[trace.calls[maker - 1].role]
        columns = "everything" if call.takes_all else " ".join(own)
        if given:
            yield Text("the data" if call.takes_all else " ".join(given), "dim")
        if own:
            yield Text.assemble((columns, style), (f" ({maker or 'driver'})", "dim"))


def _ahead(trace: Trace, colors: Mapping[str, str]) -> Iterator[RenderableType]:
    """The work of each pool in a step: the calls of a later batch, and those of the step's own.

    With partial rollouts: the calls until the step's groups have finished, and those while it learns.
    """
    yield Text(trace.ahead_in_words)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    first, then = f"first, for step i + {trace.lag}", "then, for step i"
    if trace.partial is not None:
        first, then = "first, until enough groups have finished", "then, while the step learns"
    for heading in ("pool", first, then):
        table.add_column(heading)
    continued = [trace.generation] if trace.partial is not None and trace.partial.overlaps else []
    for pool in trace.pools:
        own = [call for call in trace.calls if call.pool == pool]
        halves = (
            [call for call in own if call.is_ahead],
            [call for call in own if call in continued or not call.is_ahead],
        )
        table.add_row(pool, *(Text(" ").join(_named(half, colors)) for half in halves))
    yield table


def _named(calls: Iterable[TracedCall], colors: Mapping[str, str]) -> Iterator[Text]:
    for call in calls:
        yield Text.assemble((f"{call.number} ", "dim"), (call.role, colors[call.role]), f".{call.method}")


def _notes(trace: Trace) -> list[RenderableType]:
    legend = "(3): made by call 3. Without a number: from the data."
    if len({call.time for call in trace.calls}) < len(trace.calls):
        legend += " Bracketed calls run concurrently."
    if any(name not in trace.data for call in trace.calls for name in call.takes.get(DRIVER, ())):
        legend += " (driver): computed by the driver."
    notes = [legend]
    if trace.held_up:
        groups = "; ".join(" ".join(map(str, group)) for group in trace.held_up)
        notes.append(
            "A pool runs its calls in turn. In separate pools (placement.pools) these would run concurrently:"
            f" {groups}."
        )
    return [Text(note, "dim") for note in notes]


def _roles(trace: Trace, colors: Mapping[str, str]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("role", "kind", "pool", "runs on"):
        table.add_column(heading, no_wrap=heading != "runs on")
    for role in trace.roles:
        if role.pool is not None:
            devices = trace.pools[role.pool]
            place = f"{role.pool} ({devices} device{'s' if devices > 1 else ''})"
            table.add_row(Text(role.name, f"bold {colors[role.name]}"), role.kind, place, role.runs_on)
    absent = [role.name for role in trace.roles if role.pool is None]
    if not absent:
        return table
    return Group(table, Padding(Text(f"Not used in this configuration: {', '.join(absent)}.", "dim"), (1, 0, 0, 0)))
