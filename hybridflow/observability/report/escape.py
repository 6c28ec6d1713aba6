"""Text on the page."""

import html

from hybridflow.observability.printable import printable
from hybridflow.observability.redaction import redacted_sample, redacted_text


def shown(text: str) -> str:
    """The text as HTML, with control characters and secrets removed."""
    return html.escape(printable(redacted_text(text)))


def shown_sample(text: str) -> str:
    """What a prompt, a response or an answer says as HTML, with control characters and known secret values removed."""
    return html.escape(printable(redacted_sample(text)))
