"""The configuration in the report: the text of config.yaml with changed settings highlighted, and what differs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.section import ORIGIN
from hybridflow.observability.printable import shown
from hybridflow.observability.report.document import html_table

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
    for line, noted, origin in reversed(_lines(text)):
        indent = len(line) - len(line.lstrip())
        is_section = origin is None and bool(line.strip()) and indent < deepest
        is_changed = origin not in (None, "default")
        if is_section or is_changed:
            deepest = indent if is_section else max(deepest, indent)
        comment = "" if noted in ("", "default") else f"<em>{shown(noted)}</em>"
        kind = "changed" if is_section or is_changed else "default"
        rows.append(f'<span class="{kind}">{shown(line)}{comment}\n</span>')
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
    for line, _, origin in _lines(text):
        setting = ".".join(key for _, key in path)
        if (key := _KEY.fullmatch(line)) is None:
            if setting in found:
                value = f"{found[setting].value} {line.strip()}".strip()
                found[setting] = _Setting(value, found[setting].origin)
            continue
        path = [(indent, name) for indent, name in path if indent < len(key["indent"])]
        path.append((len(key["indent"]), key["key"]))
        if origin is not None:
            found[".".join(name for _, name in path)] = _Setting(key["value"] or "", origin)
    return found


def _lines(text: str) -> list[tuple[str, str, str | None]]:
    """Each line, the origin that it notes, and that of its setting, which the lines of a list or a long text share."""
    found: list[tuple[str, str, str | None]] = []
    origin: str | None = None
    for line, _, noted in (each.partition(ORIGIN) for each in text.splitlines()):
        origin = noted or (None if line.rstrip().endswith(":") else origin)
        found.append((line, noted, origin))
    return found
