"""Messages: a role, and content that a chat template can show; and the ids of tool calls in them."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that every chat template may be given; a template may name further ones."""


def message_flaw(message: object) -> str | None:
    """Why a value is not a message with a role and content; None if it is one.

    Content is text, or a list of parts for templates that take one. A message with tool calls may lack it.
    """
    if not isinstance(message, dict):
        return f"is of type {type(message).__name__}, not a dictionary with role and content"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        return f"has no role: {str(message)[:80]}"
    if content is None and not message.get("tool_calls"):
        return f"has no content: {str(message)[:80]}"
    if not isinstance(content, str | list | None):
        return f"has content of type {type(content).__name__}, not text"
    try:
        str(content).encode()
    except UnicodeEncodeError:
        return f"has content that is not valid Unicode: {ascii(content)[:80]}"
    return None


def call_id(index: int) -> str:
    """The id of a tool call by its number; Mistral's templates require nine letters or digits."""
    return f"call{index:05}"
