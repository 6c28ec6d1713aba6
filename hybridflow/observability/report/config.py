"""The configuration in the report: the text of config.yaml, with changed settings highlighted."""

import re

from hybridflow.observability.printable import shown

_ORIGIN = re.compile(r"^(?P<setting>.*?)\s+#\s*origin:\s*(?P<origin>.*?)\s*$")


def config_section(text: str) -> str:
    """The whole configuration, each value with its origin, and a switch to show the defaults; empty without a text.

    Changed settings, and the sections that contain them, are shown without the defaults.
    """
    if not text.strip():
        return ""
    rows, deepest = [], 0
    for line, origin in reversed(_with_origins(text)):
        indent = len(line) - len(line.lstrip())
        is_section = origin is None and bool(line.strip()) and indent < deepest
        is_changed = origin not in (None, "default")
        if is_section or is_changed:
            deepest = indent if is_section else max(deepest, indent)
        rows.append(f'<span class="{"changed" if is_section or is_changed else "default"}">{_html(line)}\n</span>')
    return (
        '<section><h2>Configuration</h2><div class="card config"><label><input type="checkbox" id="all-settings"> '
        f"show default settings</label><pre>{''.join(reversed(rows))}</pre></div></section>"
    )


def _html(line: str) -> str:
    found = _ORIGIN.match(line)
    if found is None:
        return shown(line)
    return shown(found["setting"]) + ("" if found["origin"] == "default" else f"<em>{shown(found['origin'])}</em>")


def _with_origins(text: str) -> list[tuple[str, str | None]]:
    """Each line with its origin; lines of a list or a long text have the origin of their setting."""
    found: list[tuple[str, str | None]] = []
    origin: str | None = None
    for line in text.splitlines():
        if (match := _ORIGIN.match(line)) is not None:
            origin = match["origin"]
        elif line.rstrip().endswith(":"):
            origin = None
        found.append((line, origin))
    return found
