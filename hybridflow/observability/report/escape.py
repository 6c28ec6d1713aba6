"""Text on the page."""

import html

from hybridflow.observability.printable import printable
from hybridflow.observability.redaction import redacted_text


def shown(text: str) -> str:
    """The text as HTML that neither acts nor tells secrets."""
    return html.escape(printable(redacted_text(text)))
