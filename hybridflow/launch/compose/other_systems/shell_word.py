"""A word of a shell script, as it is read."""

from dataclasses import dataclass, field

from hybridflow.errors import ConfigError

_LONGEST = 1_000_000
"""The most characters of a word, and words of an array."""


@dataclass
class Word:
    """A word that is being read; a part that is expanded without quotes may divide it."""

    parts: list[str] = field(default_factory=list)
    """The words that are complete."""

    text: str = ""
    is_begun: bool = False

    def add(self, text: str) -> None:
        """Adds text as it is. Raises `ConfigError` for more than `_LONGEST` characters or words."""
        self.text, self.is_begun = self.text + text, True
        if max(len(self.text), len(self.parts)) > _LONGEST:
            raise ConfigError(
                f"A variable of the script grows beyond {_LONGEST:,} characters or words.",
                remedy="Give the command that the script runs, instead of the script.",
            )

    def add_divided(self, text: str) -> None:
        """Adds text that is divided at its spaces."""
        if "$" in text or not text.strip():
            self.text, self.is_begun = self.text + text.strip(), self.is_begun or bool(text.strip())
            return
        first, *rest = text.split()
        self.add(first)
        for part in rest:
            self.close()
            self.add(part)

    def close(self) -> list[str]:
        """Ends the word, and returns all words."""
        if self.is_begun:
            self.parts.append(self.text)
        self.text, self.is_begun = "", False
        return self.parts
