"""Text on the page."""

import html

from hybridflow.observability.printable import printable
from hybridflow.observability.redaction import redacted_text


def shown(text: str) -> str:
    """The text as HTML, with control characters and secrets removed."""
    return html.escape(printable(redacted_text(text)))
