"""The table of algorithms for a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridflow.graph.entries import Entry


def text_tables(tables: Mapping[str, Sequence[Entry]]) -> RenderableType:
    """One table a heading: name, how it is run, what it needs, and where it comes from."""
    parts: list[RenderableType] = []
    for heading, entries in tables.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold cyan")
        table.add_column()
        for entry in entries:
            needs = f"   needs {', '.join(entry.needs)}" if entry.needs else ""
            table.add_row(entry.name, Text.assemble(entry.command, (needs, "yellow"), "\n", (entry.source, "dim")))
        parts += [Text(heading, "bold"), table, ""]
    note = "main_NAME stands for python -m hybridflow.trainer.main_NAME; all else is added to main_ppo."
    return Group(*parts, Text(note, "dim"))
