"""Tools and nothing else: those of MCP servers, or a list of functions."""

from collections.abc import Mapping, Sequence


class Tools:
    """The model may call tools; its first reply without a call ends the episode, which other functions score."""

    def __init__(self, tools: Sequence[object] = ()) -> None:
        self.tools = [*tools]

    def reset(self, row: Mapping[str, object]) -> None:
        """The prompt is that of the row."""

    def step(self, action: str) -> tuple[str, float, bool, dict]:
        """The end."""
        return "", 0.0, True, {}
