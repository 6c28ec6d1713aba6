"""Untrusted text made safe for log lines, the console and the report: control characters are shown as codes.

Prompts, responses, names of data sources and responses of servers are untrusted: they may contain escape sequences and
bidirectional marks.
"""

import html
import re
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from hybridflow.observability.redaction import redacted_sample, redacted_text

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text with codes in place of control characters, except line ends and tabs."""
    return _UNPRINTABLE.sub(_code, text)


class PlainConsole(Console):
    """A console that never prints control sequences from text, only those of its own styles."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments to print, with printable text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def error_console() -> PlainConsole:
    """A console on standard error; lines in a file or a pipe are whole."""
    return PlainConsole(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def _code(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


def shown(text: str) -> str:
    """The text as HTML, with control characters and secrets removed."""
    return html.escape(printable(redacted_text(text)))


def shown_sample(text: str) -> str:
    """A prompt, a response or an answer as HTML, without control characters and known secret values."""
    return html.escape(printable(redacted_sample(text)))
