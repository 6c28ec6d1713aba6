"""The configuration in the report: the text of config.yaml with changed settings highlighted, and what differs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridflow.observability.printable import shown
from hybridflow.observability.report.document import html_table

_ORIGIN = re.compile(r"^(?P<setting>.*?)\s+#\s*origin:\s*(?P<origin>.*?)\s*$")
_KEY = re.compile(r"(?P<indent> *)(?P<key>[^\s:#-][^:]*):(?: (?P<value>.*))?")
_OF_EACH_RUN = ("trainer.run_dir", "trainer.experiment")
"""Settings that differ because the runs are different runs."""


@dataclass(frozen=True)
class _Setting:
    value: str
    origin: str

    @property
    def is_default(self) -> bool:
        return self.origin.partition(";")[0] == "default"


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


def differing_settings(texts: Mapping[str, str]) -> str:
    """A table of the settings in which runs (texts of config.yaml by run) differ: chosen ones, then defaults."""
    runs = {run: _settings(text) for run, text in texts.items() if text.strip()}
    keys = dict.fromkeys(key for settings in runs.values() for key in settings if key not in _OF_EACH_RUN)
    differing = [
        key for key in keys if len({found.value if (found := s.get(key)) else None for s in runs.values()}) > 1
    ]
    differing.sort(key=lambda key: all(s[key].is_default for s in runs.values() if key in s))
    if not differing:
        same = "The runs have the same settings." if len(runs) > 1 else "Fewer than two runs have a config.yaml."
        return f'<section><h2>Settings that differ</h2><p class="note">{same}</p></section>'
    rows = [f"<th>{shown(key)}</th>{_cells(key, [*runs.values()])}" for key in differing]
    return f"<section><h2>Settings that differ</h2>{html_table('settings', ['', *runs], rows)}</section>"


def _cells(key: str, runs: Sequence[Mapping[str, _Setting]]) -> str:
    cells = ""
    for setting in (settings.get(key) for settings in runs):
        if setting is None:
            cells += "<td></td>"
        else:
            kind = "default" if setting.is_default else "changed"
            cells += f'<td class="{kind}" title="origin: {shown(setting.origin)}">{shown(setting.value)}</td>'
    return cells


def _settings(text: str) -> dict[str, _Setting]:
    """Values and origins by dotted name; the lines of a list or a long text are one value."""
    found: dict[str, _Setting] = {}
    path: list[tuple[int, str]] = []
    for line, origin in _with_origins(text):
        match, setting = _ORIGIN.match(line), ".".join(key for _, key in path)
        content = match["setting"] if match else line
        if (key := _KEY.fullmatch(content)) is None:
            if setting in found:
                value = f"{found[setting].value} {content.strip()}".strip()
                found[setting] = _Setting(value, found[setting].origin)
            continue
        path = [(indent, name) for indent, name in path if indent < len(key["indent"])]
        path.append((len(key["indent"]), key["key"]))
        if origin is not None:
            found[".".join(name for _, name in path)] = _Setting(key["value"] or "", origin)
    return found


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
