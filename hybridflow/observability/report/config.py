"""The configuration in the report: the text of config.yaml, with changed settings highlighted."""

import re

from hybridflow.observability.printable import shown

_ORIGIN = re.compile(r"^(?P<setting>.*?)\s+#\s*origin:\s*(?P<origin>.*?)\s*$")


def config_section(text: str) -> str:
    """The whole configuration, each value with its origin, and a switch to show the defaults; empty without a text."""
    if not text.strip():
        return ""
    lines = text.splitlines()
    rows = [
        f'<span class="{"changed" if is_kept else "default"}">{_line(line)}\n</span>'
        for line, is_kept in zip(lines, _kept(lines, _origins(lines)), strict=True)
    ]
    return (
        '<section><h2>Configuration</h2><div class="card config"><label><input type="checkbox" id="all-settings"> '
        f"show default settings</label><pre>{''.join(rows)}</pre></div></section>"
    )


def _line(line: str) -> str:
    found = _ORIGIN.match(line)
    if found is None:
        return shown(line)
    return shown(found["setting"]) + ("" if found["origin"] == "default" else f"<em>{shown(found['origin'])}</em>")


def _origins(lines: list[str]) -> list[str | None]:
    """The origin of each line; lines of a list or a long text have the origin of their setting."""
    found: list[str | None] = []
    latest: str | None = None
    for line in lines:
        match = _ORIGIN.match(line)
        if match is not None:
            latest = match["origin"]
        elif line.rstrip().endswith(":"):
            latest = None
        found.append(latest)
    return found


def _kept(lines: list[str], origins: list[str | None]) -> list[bool]:
    """Which lines are shown without the defaults: changed settings and the sections that contain them."""
    kept = [origin is not None and origin != "default" for origin in origins]
    deepest_needed = 0
    for place in range(len(lines) - 1, -1, -1):
        indent = len(lines[place]) - len(lines[place].lstrip())
        if kept[place]:
            deepest_needed = max(deepest_needed, indent)
        elif origins[place] is None and lines[place].strip() and indent < deepest_needed:
            kept[place], deepest_needed = True, indent
    return kept
